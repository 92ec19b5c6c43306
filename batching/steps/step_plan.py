"""The plan of one step, and the outputs of running it, as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batching.block_manager import BlockCopy, BlockTable
from batching.pooling import Vector
from batching.request import BatchRequest, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens `[start, stop)` of one request that a step processes.

    drafts: the last tokens of the slice, proposed to follow the tokens of the request.
    forks: other choices of the same prompt, whose first tokens are also sampled from the last row.
    keep: positions before `stop`, ascending, whose recurrent states stay in the request's slot beside
        the state at `stop`.  States at positions after `start` are made in this step; the others are
        there already.  States at all other positions are dropped.  A slice that starts at 0 starts
        without a state, any other slice with the state at `start`.
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
    def state_slot(self) -> int:
        """The slot of the recurrent state of the request, which is admitted."""
        assert self.request.state_slot is not None, "an admitted request has a slot"
        return self.request.state_slot

    @property
    def samples(self) -> bool:
        """True if the slice ends with the request's last token, so that the next token is sampled."""
        return self.request.pooling is None and self._is_last

    @property
    def embeds(self) -> bool:
        """True if the slice completes a request with pooling, so that its vector is returned."""
        return self.request.pooling is not None and self._is_last

    @property
    def num_samples(self) -> int:
        """How many tokens are sampled for the request: one after each draft and one more, or none."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def prompt_logprob_positions(self) -> range:
        """The prompt positions whose log probabilities this slice computes."""
        if not self.request.wants_prompt_logprobs:
            return range(0)
        return range(self.start + 1, min(self.stop + 1, self.request.num_prompt_tokens))

    @property
    def num_known(self) -> int:
        """The position after the request's own tokens in this slice, without drafts."""
        return self.stop - len(self.drafts)

    def table(self, *, is_windowed: bool = False) -> BlockTable:
        """Return the request's blocks, in the main pool or in that of sliding-window layers."""
        return self.request.window_table if is_windowed else self.request.block_table

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the slice, drafts included."""
        return [*self.request.token_ids[self.start : self.stop], *self.drafts]

    def __str__(self) -> str:
        drafts = f"+{len(self.drafts)}" if self.drafts else ""
        forks = "".join(f"&{fork.request_id}" for fork in self.forks)
        tokens = f"{self.start}:{self.stop - len(self.drafts)}"
        keep = "".join(f"@{position}" for position in self.keep)
        return f"{self.request.request_id}[{tokens}]{drafts}{forks}{keep}"


class StateCopy(NamedTuple):
    """An order to give slot `target` the recurrent state that slot `source` has at `position`.

    The target then holds no other state.  Slots below `max_num_seqs` belong to admitted requests, those
    above it to checkpoints.
    """

    source: int
    target: int
    position: int

    def __str__(self) -> str:
        return f"{self.source}@{self.position}>{self.target}"


class SliceOutput(NamedTuple):
    """The result of processing one slice.

    token_ids: `num_samples` tokens for the request, then one for each fork.
    logprobs: one entry for each of these, if the request asks for them.
    prompt_logprobs: one entry for each of `prompt_logprob_positions`.
    pooled: the request's pooled values so far; if the slice `embeds`, the finished vector.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    pooled: Vector | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one forward pass, and what happens to the pool before it.

    slices: in the order of service, at most one per request.
    copies, state_copies: made before the step, in this order.
    preempted: requests that lost their blocks to make room.
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
        """How many tokens of the step are prompt tokens, those computed again after preemption included."""
        return sum(max(0, min(s.stop, s.request.num_prompt_tokens) - s.start) for s in self.slices)

    def __str__(self) -> str:
        """Return one line for logs and tests, as `0[0:8]&4@4 1[4:5]+2 3>9 -2 1@8>5`.

        In this order: slices, as `request[start:stop]`, with `+` the number of drafts, `&` forks and `@` kept
        states; copies of blocks, `source>target`; preempted requests, `-request`; copies of states,
        `source@position>target`.
        """
        return " ".join(
            [
                *map(str, self.slices),
                *map(str, self.copies),
                *(f"-{r.request_id}" for r in self.preempted),
                *map(str, self.state_copies),
            ]
        )
