"""A request inside the engine: its spec, its tokens, its KV blocks and its state machine."""

import secrets
from collections.abc import Iterable
from enum import StrEnum
from hashlib import sha256
from typing import Final

from batching.adapters.adapter import NO_SLOT
from batching.block_manager import BlockContents, BlockTable
from batching.constraints.protocol import UNLIMITED
from batching.inputs.images import Spans, cache_ids
from batching.inputs.sequence_spec import SequenceSpec
from batching.pooling import PoolingType
from batching.prefix_cache import HashChain
from batching.priority_queue import Priority
from batching.prompt_lookup import PromptLookup
from batching.steps.step_plan import UNKNOWN_TOKEN, Slice, StartedSequence
from batching.steps.token_output import FinishReason, TokenLogprobs

# Behind all classes.
_BEST_EFFORT_RANK: Final = len(Priority)


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


class BatchRequest:
    """One sequence in the engine; it advances as its computed tokens catch up with its tokens.

    `token_ids` is the prompt followed by the output.  The model has processed the first
    `num_computed_tokens` of them; the rest are pending.  A step makes no difference between prefill and
    decode: a request with one pending token decodes, a request with more of them prefills, and after a
    preemption all tokens are pending again.

    Keys and values of the computed tokens are in the blocks of `block_table`.  `window_table` has the
    blocks of sliding-window layers, if those have a pool of their own, and `state_slot` is the slot of
    the recurrent state, if the model has one; it is None while the request is not admitted.
    `adapter_slot` is that of its adapter, if it has one.

    A request with `pooling` ends when its prompt is computed and returns a vector instead of tokens.

    A best-effort request (a line of a batch) runs when no other request has work, and now and then
    beside others.

    Of the tokens that follow the known ones, `num_free` need no mask of a constraint.

    While `expects_token` is true, the last token is the placeholder UNKNOWN_TOKEN: a step in flight will
    sample it, and the next step is planned before it is known.
    """

    def __init__(
        self,
        request_id: int,
        spec: SequenceSpec,
        *,
        arrival_time: float = 0.0,
        seed: int | None = None,
    ) -> None:
        """Make a request that waits.

        arrival_time: in seconds on the engine's clock.
        seed: 64 bits for the sampling; None is the spec's seed, or a random one.
        """
        assert spec.prompt, "a prompt has at least one token"
        self.request_id = request_id
        self.spec = spec
        if seed is None:
            # Chosen once, so that a request without a seed also resumes as it began.
            seed = secrets.randbits(64) if spec.sampling.seed is None else spec.sampling.seed
        self.seed = seed
        self.arrival_time = arrival_time
        self.token_ids = list(spec.prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.scheduled_time: float | None = None
        # When it was admitted last.
        self.admitted_time = 0.0
        self.block_table = BlockTable()
        self.window_table = BlockTable()
        self.state_slot: int | None = None
        self.adapter_slot = NO_SLOT
        self.hashes = HashChain(spec.cache_key)
        self._cache_ids = cache_ids(spec.prompt, spec.images) if spec.images else None
        self.spans = Spans(span for placed in spec.images for span in placed.spans)
        # Tokens that earlier steps had for it, and that were too few for a span.
        self.num_saved_tokens = 0
        self.drafter = PromptLookup()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.fork_of: BatchRequest | None = None
        self.forks: list[BatchRequest] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.expects_token = False
        self.num_free = UNLIMITED if spec.constraint is None else 0

    def __repr__(self) -> str:
        return (
            f"BatchRequest({self.request_id} {self.status}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )

    @property
    def priority(self) -> Priority:
        return self.spec.priority

    @property
    def is_best_effort(self) -> bool:
        return self.spec.is_best_effort

    @property
    def rank(self) -> int:
        """The class in the batch, smaller is more urgent; best-effort requests are behind all others."""
        return _BEST_EFFORT_RANK if self.is_best_effort else self.priority

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
    def num_inseparable(self) -> int:
        """How many of the pending tokens one step has to process at least."""
        return self.spans.num_inseparable(self.num_computed_tokens)

    def contents(self, indices: Iterable[int], block_size: int) -> list[BlockContents]:
        """Return the contents of full blocks, whose hashes are computed."""
        tokens, chain = self.cache_ids, self.hashes
        return [chain.contents(i, tokens[i * block_size : (i + 1) * block_size]) for i in indices]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def cache_ids(self) -> list[int]:
        """`token_ids` as the prefix cache knows them: rows of images have ids of their content there."""
        if self._cache_ids is None:
            return self.token_ids
        self._cache_ids[self.num_prompt_tokens :] = self.output_token_ids
        return self._cache_ids

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def has_ended(self) -> bool:
        return not TRANSITIONS[self.status]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log probabilities of prompt tokens are still to be computed."""
        asks = self.spec.sampling.prompt_logprobs is not None and not self.num_output_tokens
        return asks and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def needs_every_row(self) -> bool:
        """True if the model's output at every prompt position is needed, so that cached tokens are recomputed.

        That is the case for prompt log probabilities and for pooling over more than the last token.
        """
        if self.spec.pooling is not None:
            return self.spec.pooling.type is not PoolingType.LAST
        return self.wants_prompt_logprobs

    def fork(self, request_id: int) -> "BatchRequest":
        """Add another choice (`n`) of the same prompt, with a seed derived from this request's.

        The fork waits until this request has prefilled the prompt, and then shares its blocks.
        """
        digest = sha256(f"{self.seed} {len(self.forks)}".encode()).digest()
        request = BatchRequest(
            request_id, self.spec, arrival_time=self.arrival_time, seed=int.from_bytes(digest[:8])
        )
        request.fork_of = self
        self.forks.append(request)
        return request

    def started(self) -> StartedSequence:
        """Return what an executor has to know of the request before its first slice."""
        generated = self.token_ids[self.num_prompt_tokens : self.num_known_tokens]
        return StartedSequence(self.request_id, self.spec, self.seed, tuple(generated))

    def make_slice(
        self,
        stop: int,
        drafts: tuple[int, ...] = (),
        forks: tuple[int, ...] = (),
        keep: tuple[int, ...] = (),
    ) -> Slice:
        """Return the slice of the pending tokens up to `stop`, drafts included."""
        start, known = self.num_computed_tokens, stop - len(drafts)
        is_last, is_pooled = known == len(self.token_ids), self.spec.pooling is not None
        num_prompt_tokens = num_scored = 0
        if start < self.num_prompt_tokens:
            num_prompt_tokens = min(stop, self.num_prompt_tokens) - start
            if self.wants_prompt_logprobs:
                num_scored = min(stop + 1, self.num_prompt_tokens) - start - 1
        return Slice(
            self.request_id,
            start,
            (*self.token_ids[start:known], *drafts),
            self.block_table.value,
            self.window_table.value,
            self.state_slot,
            self.adapter_slot,
            num_drafts=len(drafts),
            num_samples=1 + len(drafts) if is_last and not is_pooled else 0,
            forks=forks,
            embeds=is_last and is_pooled,
            num_prompt_tokens=num_prompt_tokens,
            num_scored=num_scored,
            is_prefill=self.status is RequestStatus.PREFILLING,
            keep=keep,
            spans=self.spans.between(start, stop),
        )

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
        return self.expects_token and self.num_output_tokens >= self.spec.output_limit

    def expect_token(self) -> None:
        """Append a placeholder for the token that a step in flight samples."""
        self.token_ids.append(UNKNOWN_TOKEN)
        self.expects_token = True

    def forget_expected(self) -> None:
        """Remove the placeholder, if there is one: the step in flight has ended or was dropped."""
        if self.expects_token:
            self.token_ids.pop()
            self.expects_token = False

    def append(self, token_id: int, *, is_complete: bool = False) -> None:
        """Append a sampled token, and set `finish_reason` if the request ends with it.

        is_complete: the constraint lets nothing but the end follow.
        """
        assert self.finish_reason is None, "nothing follows the last token"
        self.token_ids.append(token_id)
        if is_complete or token_id in self.spec.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.spec.output_limit:
            self.finish_reason = FinishReason.LENGTH
