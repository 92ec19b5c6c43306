"""A request inside the engine: its tokens, where it stands, and how it may move."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from batching.block_manager import BlockTable
from batching.prefix_cache import HashChain
from batching.priority_queue import Priority
from batching.prompt_lookup import PromptLookup


class RequestStatus(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


TRANSITIONS: Final[dict[RequestStatus, frozenset[RequestStatus]]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.PREFILLING, RequestStatus.CANCELLED}),
    # Back to WAITING is preemption: the blocks are gone, the tokens are kept.
    RequestStatus.PREFILLING: frozenset(
        {RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.CANCELLED}
    ),
    RequestStatus.RUNNING: frozenset(
        {RequestStatus.COMPLETED, RequestStatus.WAITING, RequestStatus.CANCELLED}
    ),
    RequestStatus.COMPLETED: frozenset(),
    RequestStatus.CANCELLED: frozenset(),
}


class InvalidTransition(Exception):
    """A request was asked to move where its state does not lead: our bug."""


class FinishReason(StrEnum):
    """Why a completed request ended, in the wire's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's next token is drawn from its logits.

    temperature: 0 takes the most likely token.
    top_p, min_p: probabilities in [0, 1]; top_k: 0 is off.
    presence_penalty, frequency_penalty: logits, over the generated tokens (OpenAI).
    repetition_penalty: factor, over prompt and generated tokens (CTRL, Keskar et al. 2019).
    logit_bias: (token id, logits to add).
    seed: the same request with the same seed draws the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    @property
    def has_penalties(self) -> bool:
        """True if the tokens before it change a token's logit by more than the model says."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step gave one request.

    `token_ids` ends with the stop token when that ended the request.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int


class BatchRequest:
    """Tokens that the model has read chase tokens that there are.

    `token_ids` is the prompt followed by the output; the model has read the first
    `num_computed_tokens` of them, and their keys and values lie in `block_table`.  There is
    no prefill phase and no decode phase: a request with one pending token decodes, one with
    more of them prefills, and after a preemption all of them are pending again.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: Iterable[int] = (),
        priority: Priority = Priority.NORMAL,
        arrival_time: float = 0.0,
    ) -> None:
        assert prompt_token_ids, "a model cannot answer without reading a token"
        self.request_id = request_id
        self.sampling = sampling
        # Drawn once, so that a request without a seed also resumes as it began.
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.priority = priority
        self.arrival_time = arrival_time
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_table = BlockTable()
        self.hashes = HashChain()
        self.lookup = PromptLookup()
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return (
            f"BatchRequest({self.request_id} {self.status}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def move_to(self, status: RequestStatus) -> None:
        """Change the state; an illegal change raises InvalidTransition and changes nothing."""
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(f"request {self.request_id}: {self.status} -> {status}")
        self.status = status

    def append(self, token_id: int) -> None:
        """Take a sampled token, and say in `finish_reason` if it is the last one."""
        assert self.finish_reason is None, "nothing follows the last token"
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
