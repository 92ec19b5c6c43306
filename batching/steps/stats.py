"""What the scheduler counts."""

from dataclasses import dataclass
from typing import NamedTuple


class SchedulerStats(NamedTuple):
    """Counts at this moment (`num_waiting` to `num_cached_blocks`) and since the start.

    block_size: in tokens.
    num_awaiting_prefix: waiting requests whose prefix was being computed at the last plan.
    num_aged_admissions: requests admitted before a waiting one of a more urgent class.
    num_prefix_waits: requests that waited for another one to compute their prefix.
    num_window_blocks: blocks of the layers that see a window; None if these have none of their own.
        All other counts of blocks are of the others.
    num_window_missed_tokens: found in the others and computed again, since windows were gone (or states).
    num_checkpoints: recurrent states in the prefix cache; None if the model has no such states.
    num_checkpoints_skipped: states not stored: there are no slots, or their blocks are not findable.
    num_state_missed_tokens: found in the pool and computed again, since no state was kept there.
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
    num_checkpoints: int | None = None
    num_checkpoints_stored: int = 0
    num_checkpoints_hit: int = 0
    num_checkpoints_evicted: int = 0
    num_checkpoints_skipped: int = 0
    num_state_missed_tokens: int = 0
    num_window_blocks: int | None = None
    num_free_window_blocks: int = 0
    num_window_missed_tokens: int = 0


@dataclass(slots=True)
class SpecDecodeStats:
    """How many drafts were verified, of how many tokens, and how many of these were accepted."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0

    def record(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted
