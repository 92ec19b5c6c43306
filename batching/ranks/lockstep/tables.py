"""Block tables in plans for other ranks: only those that have changed are sent.

That is once in a block of tokens; a context of thousands of blocks would take milliseconds in each step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from batching.block_manager import BlockIds
from batching.steps.step_plan import StepPlan

_UNCHANGED: Final = BlockIds(num_dropped=-1)


class LatestTables:
    """The tables that each sequence had in its latest slice; the sender and the receiver of plans keep one each."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, bool], BlockIds] = {}

    def without_unchanged(self, plan: StepPlan) -> StepPlan:
        """Return a plan whose tables are left out where the receiver has them."""

        def left_out(key: tuple[int, bool], table: BlockIds) -> BlockIds:
            # A table is the same object until it changes.
            is_known = self._latest.get(key) is table
            self._latest[key] = table
            return _UNCHANGED if is_known else table

        return self._changed(plan, left_out)

    def with_unchanged(self, plan: StepPlan) -> StepPlan:
        """Return the plan of which `without_unchanged` has made this one."""

        def put_back(key: tuple[int, bool], table: BlockIds) -> BlockIds:
            if table == _UNCHANGED:
                return self._latest[key]
            self._latest[key] = table
            return table

        return self._changed(plan, put_back)

    def forget(self) -> None:
        self._latest.clear()

    def _changed(
        self, plan: StepPlan, change: Callable[[tuple[int, bool], BlockIds], BlockIds]
    ) -> StepPlan:
        for sequence_id in plan.gone:
            for is_windowed in (False, True):
                self._latest.pop((sequence_id, is_windowed), None)
        slices = (
            replace(
                s,
                blocks=change((s.sequence_id, False), s.blocks),
                window_blocks=change((s.sequence_id, True), s.window_blocks),
            )
            for s in plan.slices
        )
        return replace(plan, slices=tuple(slices))
