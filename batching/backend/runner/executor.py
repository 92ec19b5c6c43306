"""A model that is open: it runs steps, and gives back all that it has when it is closed."""

import gc
from collections.abc import Sequence

import mlx.core as mx

from batching.backend.hooks.changes import Changes
from batching.backend.memory.device import free_buffers
from batching.backend.platform import Platform
from batching.backend.runner.mlx_runner import EncodingStep, MLXRunner, MLXStep
from batching.block_store.entry_file import Buffer
from batching.inputs.sampling_params import SamplingParams
from batching.ranks.lockstep.steps import Lockstep
from batching.steps.step_plan import SliceOutput, StepPlan


class Executor:
    """Runs the steps of one model on its platform; a `PipelinedRunner`.

    It owns the model, its pool, and all changes to Python modules that the model needs.
    """

    def __init__(self, platform: Platform, runner: MLXRunner, changes: Changes) -> None:
        """changes: all that were made for the model, in the order in which they were made."""
        self._platform, self._runner, self._changes = platform, runner, changes
        self._is_closed = False

    @property
    def runner(self) -> MLXRunner:
        return self._runner

    def lead(self, lockstep: Lockstep) -> None:
        """Let other ranks compute all steps that follow, too."""
        self._runner.lockstep = lockstep

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        return self._runner.run(plan)

    def submit(self, plan: StepPlan, after: MLXStep | None = None) -> MLXStep | EncodingStep:
        return self._runner.submit(plan, after)

    def follow(self, plan: StepPlan) -> None:
        """Compute a step with the rank that has planned it, which alone samples."""
        self._runner.follow(plan)

    @property
    def takes_queued_steps(self) -> bool:
        return self._runner.takes_queued_steps

    def can_follow(self, sampling: SamplingParams) -> bool:
        return self._runner.can_follow(sampling)

    def reset(self) -> None:
        if self._runner.lockstep is not None:
            self._runner.lockstep.reset()
        self._runner.reset()

    def export_block(self, block_id: int, *, is_windowed: bool = False) -> list[bytes]:
        """Return the keys and values of a block, layer by layer, between two steps.

        is_windowed: the block is one of the pool of sliding-window layers.
        """
        mx.synchronize()
        return self._runner.cache.export_block(block_id, is_windowed=is_windowed)

    def import_block(
        self, block_id: int, contents: Sequence[Buffer], *, is_windowed: bool = False
    ) -> None:
        """Write what `export_block` has returned, here or in another executor of the same model.

        Raises:
            WrongBlock: the pool has blocks of another form.
        """
        mx.synchronize()
        self._runner.cache.import_block(block_id, contents, is_windowed=is_windowed)

    def close(self) -> None:
        """Give everything back: memory, and the names of Python modules; nothing may be run afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._runner.lockstep is not None:
            self._runner.lockstep.end()
        try:
            self._changes.undo()
        finally:
            del self._runner, self._changes
            release(self._platform)


def release(platform: Platform) -> None:
    """Give memory back to the system once nothing refers to the model of a platform any more."""
    gc.collect()
    free_buffers()
    platform.release()
