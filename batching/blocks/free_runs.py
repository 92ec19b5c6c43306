"""The empty blocks, kept as runs of consecutive ids."""

from collections import OrderedDict
from itertools import islice


class FreeRuns:
    """A set of block ids that knows its maximal runs; every operation is O(1) a block.

    Runs are kept by their first and by their last id (boundary tags), and by size class
    (powers of two), so that a run among the largest is found without a search, as in the
    segregated-fit allocators (Masmano et al., TLSF, 2004).

    Invariants, checked by tests/batching/blocks/test_free_runs.py:

    - `_stop_of` and `_start_of` describe the same disjoint runs `[start, stop)`
    - no two runs touch
    - `_by_class[c]` holds the starts of the runs with `2**(c-1) <= length < 2**c`
    """

    _ROOM = 16
    _ROOM_FACTOR = 4

    def __init__(self, num_blocks: int) -> None:
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Not plain dicts: finding the first entry of one takes as long as entries were deleted.
        self._by_class: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_blocks.bit_length() + 1)
        ]
        self._num_blocks = 0
        self._add(0, num_blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def some_runs(self, limit: int) -> list[tuple[int, int]]:
        """Return up to `limit` runs, in any order; O(limit)."""
        return list(islice(self._stop_of.items(), limit))

    def take(self, num_blocks: int, after: int | None = None) -> range:
        """Take up to `num_blocks` consecutive ids, at least one.

        They begin right after `after` if that block is empty, else at a position of their own.
        """
        assert self._num_blocks > 0, "the caller counts"
        start = after + 1 if after is not None else -1
        if start not in self._stop_of:
            start = self._choose_start(num_blocks)
        stop = self._stop_of[start]
        taken = range(start, min(start + num_blocks, stop))
        self._remove(start, stop)
        self._add(taken.stop, stop)
        return taken

    def put(self, block_id: int) -> None:
        """Add one id; it joins the runs it touches."""
        start, stop = block_id, block_id + 1
        if (left := self._start_of.get(block_id)) is not None:
            self._remove(left, block_id)
            start = left
        if (right := self._stop_of.get(stop)) is not None:
            self._remove(stop, right)
            stop = right
        self._add(start, stop)

    def _choose_start(self, num_blocks: int) -> int:
        """Choose where a new table begins, and split a run there.

        Behind the start of a large run, the table in front of it has room to grow; a run without
        several times what is asked for is used from its start.  More room than some blocks would
        take pages of memory all over the pool for a few tokens.
        """
        start = next(iter(next(runs for runs in reversed(self._by_class) if runs)))
        stop = self._stop_of[start]
        enough = self._ROOM_FACTOR * num_blocks
        room = min((stop - start) // 2, max(self._ROOM, enough))
        if start == 0 or room < enough:
            return start
        self._remove(start, stop)
        self._add(start, start + room)
        self._add(start + room, stop)
        return start + room

    def _add(self, start: int, stop: int) -> None:
        if start == stop:
            return
        self._stop_of[start] = stop
        self._start_of[stop] = start
        self._by_class[(stop - start).bit_length()][start] = None
        self._num_blocks += stop - start

    def _remove(self, start: int, stop: int) -> None:
        del self._stop_of[start]
        del self._start_of[stop]
        del self._by_class[(stop - start).bit_length()][start]
        self._num_blocks -= stop - start
