"""A request inside the engine: its tokens, its state, and how that may change."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Final, NamedTuple

from batching.block_manager import BlockTable
from batching.constraints.protocol import TokenConstraint
from batching.pooling import PoolingParams, PoolingType, Vector
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
    """A request was moved to a state that its own does not lead to: our bug."""


class FinishReason(StrEnum):
    """Why a completion ended, in OpenAI's and vLLM's words.

    The scheduler sets STOP and LENGTH; the layers above it, the others.
    """

    STOP = "stop"
    LENGTH = "length"
    # Of a choice, in the layer that parses text; its sequence ends with STOP.
    TOOL_CALLS = "tool_calls"
    # The client disconnected, or the layer above needs no more of it.
    ABORT = "abort"
    # The request's deadline has passed.
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's next token is sampled from its logits.

    temperature: 0 takes the most probable token.
    top_p, min_p: probabilities in [0, 1]; top_k: 0 is off.
    top_n_sigma: logits within so many standard deviations of the highest remain (Tang et al. 2024);
        0 is off.
    presence_penalty, frequency_penalty: logits, over the generated tokens (OpenAI).
    repetition_penalty: factor, over prompt and generated tokens (CTRL, Keskar et al. 2019).
    logit_bias: pairs of token id and logits to add.
    min_tokens: how many tokens come before a stop token may.
    bad_words: token sequences that are never completed.
    logprobs, prompt_logprobs: how many of the most probable tokens are returned at each position
        of the output and of the prompt, beside the token there; None is no log probabilities.
    logprob_token_ids: returned instead of the most probable tokens, at each position of the output,
        beside the token there.
    seed: the same request with the same seed samples the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @property
    def output_logprobs(self) -> int | tuple[int, ...] | None:
        """How many of the most probable tokens come with each token of the output, or which ones."""
        return None if self.logprobs is None else self.logprob_token_ids or self.logprobs

    @property
    def has_penalties(self) -> bool:
        """True if a token's logit depends on how often it occurs before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


GREEDY: Final = SamplingParams(temperature=0.0)

# Stands for the token that a step in flight samples.
UNKNOWN_TOKEN: Final = -1


class TokenLogprobs(NamedTuple):
    """The log probability of a token, from the unmodified logits.

    logprob: natural logarithm.
    top: pairs of token id and log probability of the most probable tokens, descending; or of those
        that the request names, in its order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(NamedTuple):
    """The output of one step for one request.

    token_ids: ends with the stop token when that ended the request.
    logprobs: one for each token, if the request asks for them.
    prompt_logprobs: one for each prompt token but the first, with the first output, likewise.
    num_read_tokens: prefilled so far, in an output without tokens that reports progress.
    scheduled_time: of the first step that prefilled the prompt, on the engine's clock.
    num_preemptions: how often the request was preempted so far.
    embedding: of a pooled request, which has no tokens.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_read_tokens: int = 0
    scheduled_time: float = 0.0
    num_preemptions: int = 0
    embedding: Vector | None = None

    @property
    def is_progress(self) -> bool:
        """True if it reports how far the prefill is, and nothing else."""
        return not self.token_ids and self.embedding is None


class BatchRequest:
    """Computed tokens catch up with all tokens.

    `token_ids` is the prompt followed by the output; the model has computed the first
    `num_computed_tokens` of them, and their keys and values are in the blocks of `block_table`, those of
    layers that see a window perhaps in those of `window_table`.  There is no prefill phase and no
    decode phase: a request with one pending token decodes, one with more of them prefills, and after a
    preemption all of them are pending again.  `state_slot` is where the model keeps the recurrent state
    of an admitted request, if it has any.

    A request with `pooling` ends with its prefill, and gets a vector instead of tokens; `pooled` is what
    was pooled so far.

    A best-effort request runs in steps that no other has work for, and now and then beside others.

    While `expects_token` is true, the last token is UNKNOWN_TOKEN: a step in flight samples it, and the
    next one is planned meanwhile.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: Iterable[int] = (),
        constraint: TokenConstraint | None = None,
        priority: Priority = Priority.NORMAL,
        is_best_effort: bool = False,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        reports_progress: bool = False,
        pooling: PoolingParams | None = None,
    ) -> None:
        assert prompt_token_ids, "a prompt has at least one token"
        self.request_id = request_id
        self.sampling = sampling
        # Chosen once, so that a request without a seed also resumes as it began.
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.constraint = constraint
        self.priority = priority
        self.is_best_effort = is_best_effort
        self.arrival_time = arrival_time
        self.reports_progress = reports_progress
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.scheduled_time: float | None = None
        self.block_table = BlockTable()
        self.window_table = BlockTable()
        self.state_slot: int | None = None
        self.cache_salt = cache_salt
        self.hashes = HashChain(cache_salt.encode())
        self.drafter = PromptLookup()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooling = pooling
        self.pooled: Vector | None = None
        self.fork_of: BatchRequest | None = None
        self.forks: list[BatchRequest] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.expects_token = False

    def __repr__(self) -> str:
        return (
            f"BatchRequest({self.request_id} {self.status}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.expects_token

    @property
    def num_pending_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def has_ended(self) -> bool:
        return not TRANSITIONS[self.status]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log probabilities of prompt tokens are still to be computed."""
        asks = self.sampling.prompt_logprobs is not None and not self.num_output_tokens
        return asks and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def needs_every_row(self) -> bool:
        """True if what the model makes of cached tokens is needed, too, and not only their keys."""
        if self.pooling is not None:
            return self.pooling.type is not PoolingType.LAST
        return self.wants_prompt_logprobs

    def forget_rows(self) -> None:
        """Drop what the rows of a prompt have given that is computed again from its beginning."""
        self.prompt_logprobs.clear()
        self.pooled = None

    def fork(self, request_id: int) -> "BatchRequest":
        """Add another choice of the same prompt, with a seed of its own.

        It waits until this request has prefilled the prompt, and shares its blocks.
        """
        seed = f"{self.seed} {len(self.forks)}".encode()
        request = BatchRequest(
            request_id,
            self.token_ids[: self.num_prompt_tokens],
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
            constraint=self.constraint and self.constraint.fork(),
            priority=self.priority,
            is_best_effort=self.is_best_effort,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
        )
        request.seed = int.from_bytes(sha256(seed).digest()[:8])
        request.fork_of = self
        self.forks.append(request)
        return request

    def move_to(self, status: RequestStatus) -> None:
        """Change the state; an illegal change raises InvalidTransition and changes nothing."""
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(f"request {self.request_id}: {self.status} -> {status}")
        self.status = status

    @property
    def expects_last_token(self) -> bool:
        """True if the token that is expected is the last one, whichever it is."""
        return self.expects_token and self.num_output_tokens >= self.max_tokens

    def expect_token(self) -> None:
        """Make room for the token that a step in flight samples."""
        self.token_ids.append(UNKNOWN_TOKEN)
        self.expects_token = True

    def forget_expected(self) -> None:
        """Drop the token that is expected, if there is one: it is known now, or never will be."""
        if self.expects_token:
            self.token_ids.pop()
            self.expects_token = False

    def append(self, token_id: int) -> None:
        """Append a sampled token; `finish_reason` is set if it is the last one."""
        assert self.finish_reason is None, "nothing follows the last token"
        self.token_ids.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if token_id in self.stop_token_ids or (self.constraint and self.constraint.is_complete):
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
