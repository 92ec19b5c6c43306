"""The statistics of the scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class StoreUse(NamedTuple):
    """What a model has in the store of blocks, and what became of it since the start.

    num_entries, num_bytes: blocks and states of the model that are there.
    num_unsaved: those that wait to be stored.
    host_bytes: of those in the host's memory.
    num_restored_tokens: prompt tokens that were read instead of computed.
    num_lost: entries that were deleted, or could not be read, when they were needed.
    num_damaged: entries that were not what was written; they are deleted.
    skipped: what was not stored, or not read, by the reason.
    """

    num_entries: int = 0
    num_bytes: int = 0
    num_unsaved: int = 0
    host_bytes: int = 0
    num_restored_tokens: int = 0
    num_read: int = 0
    bytes_read: int = 0
    num_written: int = 0
    bytes_written: int = 0
    num_lost: int = 0
    num_damaged: int = 0
    skipped: Mapping[str, int] = {}


class SchedulerStats(NamedTuple):
    """Gauges (`num_waiting` to `num_cached_blocks`) and counters since the start.

    num_awaiting_prefix: waiting requests whose prefix was being computed by another at the last plan.
    block_size: tokens in a block.
    num_urgent_preemptions: those of them that made way for a waiting request of a higher class.
    num_evictions: cached blocks that were evicted.
    num_retained_blocks: blocks that requests have asked to be evicted behind all others.
    num_pinned_blocks, max_pinned_blocks: those of them without a time limit, and how many there may be.
    num_queried_tokens, num_hit_tokens: prompt tokens of admitted requests, and those found in the cache.
    num_aged_admissions: requests that were admitted before a waiting one of a more urgent class.
    num_prefix_waits: requests that waited for another one to compute their prefix.
    num_drafts, num_draft_tokens, num_accepted_tokens: verified drafts, their tokens, and how many of
        these were correct.
    num_images_encoded: images that the tower has read.
    num_adapters_loaded: adapters in slots.
    num_adapter_hits, num_adapter_loads: how often an admitted request found its adapter there, and how often not.
    num_checkpoints: recurrent states in the prefix cache; None if the model has no such state.
    num_checkpoints_skipped: states that were not stored, since there are no slots or their blocks
        cannot be found.
    num_state_missed_tokens: prompt tokens found in the pool but computed again, since there was no
        state at their end.
    num_window_blocks: blocks in the pool of sliding-window layers; None if they have no pool of their
        own.  All other counts of blocks are those of the main pool.
    num_window_missed_tokens: prompt tokens found in the main pool but computed again, since the blocks
        of sliding-window layers (or the states) were gone.
    store: of the store of blocks; None without one.
    """

    num_waiting: int
    num_running: int
    num_prefilling: int
    num_awaiting_prefix: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_aged_admissions: int
    num_prefix_waits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_urgent_preemptions: int = 0
    num_images_encoded: int = 0
    num_adapters_loaded: int = 0
    num_adapter_hits: int = 0
    num_adapter_loads: int = 0
    num_retained_blocks: int = 0
    num_pinned_blocks: int = 0
    max_pinned_blocks: int = 0
    num_checkpoints: int | None = None
    num_checkpoints_stored: int = 0
    num_checkpoints_hit: int = 0
    num_checkpoints_evicted: int = 0
    num_checkpoints_skipped: int = 0
    num_state_missed_tokens: int = 0
    num_window_blocks: int | None = None
    num_free_window_blocks: int = 0
    num_window_missed_tokens: int = 0
    store: StoreUse | None = None


@dataclass(slots=True)
class SpecDecodeStats:
    """Counts verified drafts, their tokens, and how many of these were correct."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0

    def record(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted
