"""Blocks that leave the pool of one executor as bytes, and enter another's."""

from itertools import product
from typing import Final

import mlx.core as mx
import pytest

from batching.backend.hooks.changes import Changes
from batching.backend.paged.block_bytes import WrongBlock
from batching.backend.runner.executor import Executor
from batching.block_manager import BlockTable
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.step_plan import Slice, StartedSequence, StepPlan
from tests.support.model_zoo import make_tiny
from tests.support.serving import TIGHT, limits, make_runner
from tests.support.tiny_models import VOCAB_SIZE, Check
from tests.support.weekly import weekly

PROMPT: Final = tuple(range(3, 15))
HERE: Final = (4, 9, 2, 7)
THERE: Final = (11, 3, 8, 5)
NUM_FULL: Final = len(PROMPT) // TIGHT.block_size
# Plain, with windows, latents, and keys that are gathered for the model's own attention.
FAMILIES: Final = ["llama", "gemma3_text", "deepseek_v3", "deepseek_v32"]


def executor_of(family: str, check: Check, dtype: mx.Dtype | None) -> tuple[Executor, bool]:
    """Return an executor of a model that is the same each time, and whether it has blocks of windows."""
    model = make_tiny(family)
    checked = check(model, VOCAB_SIZE, kv_dtype=dtype)
    runner = make_runner(model, VOCAB_SIZE, checked)
    has_windows = limits(checked).window is not None
    return Executor(checked.platform, runner, Changes()), has_windows


def started() -> StartedSequence:
    sampling = SamplingParams(temperature=0.0, logprobs=5)
    return StartedSequence(
        0, SequenceSpec(prompt=(*PROMPT, 1), max_tokens=1, sampling=sampling), seed=0
    )


def slice_in(
    blocks: tuple[int, ...], start: int, token_ids: tuple[int, ...], num_samples: int = 0
) -> Slice:
    table = BlockTable(blocks).value
    return Slice(0, start, token_ids, table, table, num_samples=num_samples)


def next_token(executor: Executor, blocks: tuple[int, ...], *, is_new: bool) -> object:
    """Return the token after the prompt and one more, with its probabilities, given the prompt's blocks."""
    plan = StepPlan(
        (slice_in(blocks, len(PROMPT), (1,), 1),),
        started=(started(),) if is_new else (),
    )
    return executor.run(plan)


@pytest.mark.parametrize(("family", "dtype"), weekly(product(FAMILIES, [None, mx.bfloat16]), 3))
def test_a_request_goes_on_from_the_blocks_of_another_executor(
    device_kind: Check, family: str, dtype: mx.Dtype | None
) -> None:
    first, has_windows = executor_of(family, device_kind, dtype)
    second, _ = executor_of(family, device_kind, dtype)
    first.run(StepPlan((slice_in(HERE, 0, PROMPT),), started=(started(),)))
    for is_windowed in (False, True) if has_windows else (False,):
        for source, target in zip(HERE[:NUM_FULL], THERE, strict=False):
            contents = first.export_block(source, is_windowed=is_windowed)
            assert any(map(any, contents))
            second.import_block(target, contents, is_windowed=is_windowed)
            assert second.export_block(target, is_windowed=is_windowed) == contents
    assert next_token(second, THERE, is_new=True) == next_token(first, HERE, is_new=False)


def test_blocks_of_another_form_are_rejected(device_kind: Check) -> None:
    executor, _ = executor_of("llama", device_kind, None)
    contents = executor.export_block(1)
    with pytest.raises(WrongBlock, match=f"of {len(contents)} layers, not {len(contents) - 1}"):
        executor.import_block(1, contents[1:])
    with pytest.raises(WrongBlock, match=r"has \d+ bytes, not 1"):
        executor.import_block(1, [b"x"] * len(contents))
