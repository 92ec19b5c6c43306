"""A request inside the engine: its parameters, its tokens, its KV blocks and its state machine."""

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
    """Where a request is in its life; `TRANSITIONS` has the legal changes.

    WAITING: in the admission queue, without KV blocks.
    PREFILLING: admitted; prompt tokens are still to be computed.
    RUNNING: decoding, one or more output tokens per step.
    COMPLETED, CANCELLED: final, with and without a complete output.
    """

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
    """An illegal change of a request's state, which is always a bug in the engine."""


class FinishReason(StrEnum):
    """Why a completion ended, in the terms of OpenAI and vLLM.

    The scheduler sets STOP and LENGTH; the layers above the engine set the others.
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
    """How the next token of a request is sampled from the logits.

    temperature: divides the logits; 0 is greedy decoding.
    top_p, min_p: probabilities in [0, 1]; 1 and 0 turn them off.
    top_k: how many of the most probable tokens are kept; 0 turns it off.
    top_n_sigma: keep logits within this many standard deviations of the highest one (Tang et al. 2024);
        0 turns it off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that were generated before,
        once or once per occurrence (OpenAI).
    repetition_penalty: a factor for tokens of the prompt and the output (CTRL, Keskar et al. 2019).
    logit_bias: pairs of token id and the value that is added to its logit.
    min_tokens: how many output tokens are generated before a stop token is allowed.
    bad_words: token sequences that the output must not contain.
    logprobs, prompt_logprobs: how many of the most probable tokens are returned with their log
        probabilities at each position of the output or the prompt, beside the token itself; None
        returns no log probabilities.
    logprob_token_ids: tokens whose log probabilities are returned at each output position, instead of
        those of the most probable ones.
    seed: the same request with the same seed samples the same tokens; None draws a random seed.
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
        """The alternatives to report for each output token: how many of the most probable, or which ids.

        None reports no log probabilities.
        """
        return None if self.logprobs is None else self.logprob_token_ids or self.logprobs

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the tokens that came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


GREEDY: Final = SamplingParams(temperature=0.0)

# Stands for the token that a step in flight samples.
UNKNOWN_TOKEN: Final = -1


class TokenLogprobs(NamedTuple):
    """The log probability of one token and of its alternatives, from the unmodified logits.

    logprob: natural logarithm of the probability of the token at this position.
    top: pairs of token id and log probability: the most probable tokens in descending order, or the
        tokens of `logprob_token_ids` in the order of the request.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(NamedTuple):
    """What one step produced for one request.

    token_ids: the new tokens; several if drafts were accepted, none in an output that only reports
        progress or carries an embedding.  A stop token that ended the request is included.
    finish_reason: None unless the request ends with this output.
    num_cached_tokens: prompt tokens that were taken from the prefix cache.
    logprobs: one entry per token, if the request asks for them.
    prompt_logprobs: one entry per prompt token except the first; only in the first output, if the
        request asks for them.
    num_read_tokens: prompt tokens prefilled so far, in an output that only reports progress.
    scheduled_time: when the first step of the prefill began, in seconds on the engine's clock.
    num_preemptions: how often the request has been preempted so far.
    embedding: the vector of a request with `pooling`, which generates no tokens.
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
        """True if the output only reports the progress of the prefill."""
        return not self.token_ids and self.embedding is None


class BatchRequest:
    """One sequence in the engine; it advances as its computed tokens catch up with its tokens.

    `token_ids` is the prompt followed by the output.  The model has processed the first
    `num_computed_tokens` of them; the rest are pending.  A step makes no difference between prefill and
    decode: a request with one pending token decodes, a request with more of them prefills, and after a
    preemption all tokens are pending again.

    Keys and values of the computed tokens are in the blocks of `block_table`.  `window_table` has the
    blocks of sliding-window layers, if those have a pool of their own, and `state_slot` is the slot of
    the recurrent state, if the model has one; it is None while the request is not admitted.

    A request with `pooling` ends when its prompt is computed and returns a vector instead of tokens;
    `pooled` holds what its chunks have contributed so far.

    A best-effort request (a line of a batch) runs when no other request has work, and now and then
    beside others.

    While `expects_token` is true, the last token is the placeholder UNKNOWN_TOKEN: a step in flight will
    sample it, and the next step is planned before it is known.
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
        """Prompt and output tokens together, a placeholder included."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens without the placeholder of a token that is being sampled."""
        return len(self.token_ids) - self.expects_token

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that the model still has to process."""
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
        """True if the model's output at every prompt position is needed, so that cached tokens are recomputed.

        That is the case for prompt log probabilities and for pooling over more than the last token.
        """
        if self.pooling is not None:
            return self.pooling.type is not PoolingType.LAST
        return self.wants_prompt_logprobs

    def forget_rows(self) -> None:
        """Discard the prompt log probabilities and pooled values, since the prompt is computed again."""
        self.prompt_logprobs.clear()
        self.pooled = None

    def fork(self, request_id: int) -> "BatchRequest":
        """Add another choice (`n`) of the same prompt, with a seed derived from this request's.

        The fork waits until this request has prefilled the prompt, and then shares its blocks.
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
        """Change the state.

        Raises:
            InvalidTransition: the change is illegal; the state stays as it was.
        """
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(f"request {self.request_id}: {self.status} -> {status}")
        self.status = status

    @property
    def expects_last_token(self) -> bool:
        """True if the token that a step in flight samples reaches `max_tokens`."""
        return self.expects_token and self.num_output_tokens >= self.max_tokens

    def expect_token(self) -> None:
        """Append a placeholder for the token that a step in flight samples."""
        self.token_ids.append(UNKNOWN_TOKEN)
        self.expects_token = True

    def forget_expected(self) -> None:
        """Remove the placeholder, if there is one: the step in flight has ended or was dropped."""
        if self.expects_token:
            self.token_ids.pop()
            self.expects_token = False

    def append(self, token_id: int) -> None:
        """Append a sampled token, and set `finish_reason` if the request ends with it."""
        assert self.finish_reason is None, "nothing follows the last token"
        self.token_ids.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if token_id in self.stop_token_ids or (self.constraint and self.constraint.is_complete):
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
