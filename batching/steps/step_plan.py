"""What one step of the engine will do, as a value."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batching.block_manager import BlockCopy, BlockTable
from batching.pooling import Vector
from batching.request import BatchRequest, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `[start, stop)` of one request, to be processed in one step.

    drafts: the last of them, proposed to follow the tokens of the request.
    forks: other choices of the same prompt, whose first tokens are sampled from the last row too.
    keep: the positions before `stop`, ascending, whose recurrent states stay in the request's slot
        beside the one at `stop`.  Those after `start` are taken during the step; the others were
        there.  What is not named is dropped.  A slice that begins at 0 begins without a state, any
        other with the one at `start`.
    """

    request: BatchRequest
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    forks: tuple[BatchRequest, ...] = ()
    keep: tuple[int, ...] = ()
    # When it was planned: its tokens are known later, or the request has ended by then.
    _is_last: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_last = self.num_known == self.request.num_tokens
        object.__setattr__(self, "_is_last", is_last)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """True if the slice leaves nothing pending, so that the next token is sampled."""
        return self.request.pooling is None and self._is_last

    @property
    def embeds(self) -> bool:
        """True if the slice leaves nothing pending of a request that gets a vector."""
        return self.request.pooling is not None and self._is_last

    @property
    def num_samples(self) -> int:
        """How many of the last rows a token is sampled from: one for each draft, and one."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def prompt_logprob_positions(self) -> range:
        """The prompt positions whose log probabilities come from the rows of this slice."""
        if not self.request.wants_prompt_logprobs:
            return range(0)
        return range(self.start + 1, min(self.stop + 1, self.request.num_prompt_tokens))

    @property
    def num_known(self) -> int:
        """The position behind its tokens, drafts not included."""
        return self.stop - len(self.drafts)

    def table(self, *, is_windowed: bool = False) -> BlockTable:
        """Return the blocks of all layers, or of those that have windows and blocks of their own."""
        return self.request.window_table if is_windowed else self.request.block_table

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids[self.start : self.stop], *self.drafts]

    def __str__(self) -> str:
        drafts = f"+{len(self.drafts)}" if self.drafts else ""
        forks = "".join(f"&{fork.request_id}" for fork in self.forks)
        tokens = f"{self.start}:{self.stop - len(self.drafts)}"
        keep = "".join(f"@{position}" for position in self.keep)
        return f"{self.request.request_id}[{tokens}]{drafts}{forks}{keep}"


class StateCopy(NamedTuple):
    """Slot `target` is to hold the state that slot `source` has at `position`, and no other.

    The slots below `max_num_seqs` are those of admitted requests; the others, of checkpoints.
    """

    source: int
    target: int
    position: int

    def __str__(self) -> str:
        return f"{self.source}@{self.position}>{self.target}"


class SliceOutput(NamedTuple):
    """The result of processing a slice.

    token_ids: `num_samples` for the request, then one for each fork.
    logprobs: one for each of them, if the request asks for them.
    prompt_logprobs: one for each position of `prompt_logprob_positions`.
    pooled: what its rows that are pooled have added to what the request had before; if the slice embeds, the
        vector itself.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    pooled: Vector | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one forward pass, and what happened to make room for them.

    state_copies: made before the step, in this order.
    """

    slices: tuple[Slice, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[BatchRequest, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.slices)

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are prompts'; those of a prompt are computed again after preemption."""
        return sum(max(0, min(s.stop, s.request.num_prompt_tokens) - s.start) for s in self.slices)

    def __str__(self) -> str:
        """One line a step, for logs and for tests: `0[0:8]&4@4 1[4:5]+2 3>9 -2 1@8>5`."""
        return " ".join(
            [
                *map(str, self.slices),
                *map(str, self.copies),
                *(f"-{r.request_id}" for r in self.preempted),
                *map(str, self.state_copies),
            ]
        )
