"""What one step of the engine will do, as a value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batching.block_manager import BlockCopy
from batching.request import BatchRequest, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `[start, stop)` of one request, to be processed in one step.

    drafts: the last of them, proposed to follow the tokens of the request.
    forks: other choices of the same prompt, whose first tokens are sampled from the last row too.
    """

    request: BatchRequest
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    forks: tuple[BatchRequest, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """True if the slice leaves nothing pending, so that the next token is sampled."""
        return self.stop - len(self.drafts) == self.request.num_tokens

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
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids[self.start : self.stop], *self.drafts]

    def __str__(self) -> str:
        drafts = f"+{len(self.drafts)}" if self.drafts else ""
        forks = "".join(f"&{fork.request_id}" for fork in self.forks)
        tokens = f"{self.start}:{self.stop - len(self.drafts)}"
        return f"{self.request.request_id}[{tokens}]{drafts}{forks}"


class SliceOutput(NamedTuple):
    """The result of processing a slice.

    token_ids: `num_samples` for the request, then one for each fork.
    logprobs: one for each of them, if the request asks for them.
    prompt_logprobs: one for each position of `prompt_logprob_positions`.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one forward pass, and what happened to make room for them."""

    slices: tuple[Slice, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[BatchRequest, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.slices)

    def __str__(self) -> str:
        """One line a step, for logs and for tests: `0[0:8]&4 1[4:5]+2 3>9 -2`."""
        return " ".join(
            [
                *map(str, self.slices),
                *(f"{c.source}>{c.target}" for c in self.copies),
                *(f"-{r.request_id}" for r in self.preempted),
            ]
        )
