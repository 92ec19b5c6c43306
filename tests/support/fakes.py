"""Fakes at the lowest edge; each rejects what the real thing cannot do."""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from batching.adapters.adapter import NO_SLOT, Adapter
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockIds
from batching.block_store.entry_file import Entry
from batching.block_store.keys import Kind
from batching.block_store.store import BlockStore
from batching.config import SchedulerConfig
from batching.constraints.thinking import ThinkingMatcher
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.images import Span, cache_ids
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_info.model import ModelInfo, Tokenizer
from batching.pooling import PoolingParams, Vector
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.model_runner import ModelRunner
from batching.steps.sequences import Sequences, SequenceState, recorded
from batching.steps.step_plan import Slice, SliceOutput, StepPlan
from batching.steps.token_output import TokenLogprobs
from tests.support.block_stores import FakeStore
from tests.support.pipelined import Pipelined
from tests.support.requests import make_request

VOCAB_SIZE = 64


def next_token(prefix: Sequence[int]) -> int:
    """A language model: what follows depends on every token before it and their order."""
    return crc32(bytes(prefix)) % VOCAB_SIZE


def read_by_model(spec: SequenceSpec) -> list[int]:
    """Return what the model sees of a prompt: a row of an image is what the image has there."""
    return [i if i >= 0 else VOCAB_SIZE + i % 191 for i in cache_ids(spec.prompt, spec.images)]


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The one oracle: what any request must get, whatever else is served."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def expected_logprobs(prefix: Sequence[int], num_top: int = 0) -> TokenLogprobs:
    """The log probability of what follows in this model; it depends on the prefix too."""
    logprob = -crc32(bytes([*prefix, 0])) / (1 << 32)
    return TokenLogprobs(logprob, ((33, -0.25), (34, logprob - 1))[:num_top])


def hidden_state(prefix: Sequence[int]) -> list[float]:
    """What the model makes of the last token, which depends on every token before it."""
    return [byte + 1.0 for byte in crc32(bytes(token % 256 for token in prefix)).to_bytes(4)]


def expected_vector(prompt: Sequence[int], params: PoolingParams) -> list[float]:
    """The oracle of a pooled request."""
    positions = params.rows(0, len(prompt), len(prompt))
    return _vector([hidden_state(prompt[: position + 1]) for position in positions], params)


def _vector(rows: Sequence[Sequence[float]], params: PoolingParams) -> list[float]:
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)][: params.dimensions]
    length = math.hypot(*means) if params.normalize else 1.0
    return list(array("f", [mean / length for mean in means]))


class TokenRunner:
    """A model runner whose KV pool holds token ids instead of tensors.

    It reads each prefix back through the block table.  A block that is shared wrongly,
    freed early, copied late or skipped changes the next token, as in a real model.

    With a `window` it has a second pool, of layers that read the last tokens only; these must be
    the request's, and a block that it has dropped cannot be read.

    The rows of an image are there after all its pieces were encoded, in their order, and until it is dropped.

    With `num_checkpoints` it has recurrent states: the state at a position is the tuple of the
    tokens before it, and a slice that does not begin with the right one fails.
    """

    vocab_size = 256

    def __init__(
        self, config: SchedulerConfig, store: FakeStore | BlockStore | None = None
    ) -> None:
        self._store = store
        self._block_size = config.block_size
        self._num_slots = config.num_blocks * config.block_size
        self._window = config.window
        self._num_window_slots = config.num_window_blocks * config.block_size
        self._max_num_seqs = config.max_num_seqs
        self._num_checkpoints = config.num_checkpoints
        self._max_adapters = config.max_adapters
        self.reset()

    def reset(self) -> None:
        self.sequences = Sequences()
        # 255 is no token: reading a slot that was never written shows.
        self._pool = [255] * self._num_slots
        # The adapter with which each slot of the pool was computed.
        self._written_by: list[Adapter | None] = [None] * self._num_slots
        self._adapters: dict[int, Adapter | None] = {NO_SLOT: None}
        self._window_pool = [255] * self._num_window_slots
        num_states = self._max_num_seqs + (self._num_checkpoints or 0)
        self._states: list[dict[int, tuple[int, ...]]] = [{} for _ in range(num_states)]
        # How many pieces of each image are left.
        self._images: dict[bytes, int] = {}

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        assert not plan.is_empty or self._store is not None, "no step is empty"
        self._states_of = self.sequences.begin(plan)
        self._encode(plan)
        for slot, adapter in plan.adapters:
            assert 0 < slot <= self._max_adapters
            self._adapters[slot] = adapter
        for copy in plan.copies:
            source, target = (self._block(b) for b in (copy.source, copy.target))
            pool = self._window_pool if copy.is_windowed else self._pool
            pool[target] = pool[source]
            if not copy.is_windowed:
                self._written_by[target] = self._written_by[source]
        for state_copy in plan.state_copies:
            state = self._states[state_copy.source][state_copy.position]
            self._states[state_copy.target] = {state_copy.position: state}
        self._save(plan)
        self._restore(plan)
        for s in plan.slices:
            assert s.start < s.stop, "a slice has at least one token"
            known = self._states_of[s.sequence_id].token_ids[s.start : s.num_known]
            assert known == list(s.token_ids[: len(known)]), "tokens that it does not have"
            for position, token_id in zip(range(s.start, s.stop), self._seen(s), strict=True):
                self._pool[self._slot(s.blocks, position)] = token_id
                self._written_by[self._slot(s.blocks, position)] = self._adapters[s.adapter_slot]
                if self._window is not None:
                    slot = self._slot(s.window_blocks, position)
                    self._window_pool[slot] = token_id
        for s in plan.slices:
            self._read_window(s)
        self._advance_states(plan)
        return [recorded(s, self._states_of, self._output(s)) for s in plan.slices]

    def _save(self, plan: StepPlan) -> None:
        for order in plan.saves:
            assert self._store is not None
            if order.key.kind is Kind.STATE:
                contents = [bytes(self._states[order.source][order.position])]
            elif order.key.kind is Kind.WINDOW:
                contents = [bytes(self._window_pool[self._block(order.source)])]
            else:
                contents = [bytes(self._pool[self._block(order.source)])]
                adapter = self._written_by[order.source * self._block_size]
                contents += [] if adapter is None else [adapter.digest.encode()]
            self._store.put(Entry(order.key, order.parent, order.token_ids, contents))

    def _restore(self, plan: StepPlan) -> None:
        for order in plan.restores:
            assert self._store is not None
            kept, *digests = map(bytes, self._store.take(order.key).contents)
            adapter = Adapter("", "", digests[0].decode()) if digests else None
            for target in order.targets:
                if order.key.kind is Kind.STATE:
                    self._states[target] = {order.position: tuple(kept)}
                elif order.key.kind is Kind.WINDOW:
                    self._window_pool[self._block(target)] = list(kept)
                else:
                    self._pool[self._block(target)] = list(kept)
                    self._written_by[self._block(target)] = [adapter] * self._block_size

    def _encode(self, plan: StepPlan) -> None:
        for digest in plan.dropped_images:
            del self._images[digest]
        for order in plan.encodes:
            digest, num_left = order.image.digest, order.num_pieces - order.first
            assert 0 <= order.first < order.stop <= order.num_pieces
            assert self._images.get(digest) == (num_left if order.first else None)
            self._images[digest] = order.num_pieces - order.stop

    def _seen(self, s: Slice) -> list[int]:
        """Return the slice's tokens as the model sees them."""
        spec = self._states_of[s.sequence_id].spec
        for start, image in spec.images:
            rows = [start + row for row in image.rows if s.start <= start + row < s.stop]
            assert not rows or self._images.get(image.digest) == 0, "rows that are not encoded"
        self._check_spans(s, [span for placed in spec.images for span in placed.spans])
        of_prompt = read_by_model(spec)[s.start : s.stop]
        return [*of_prompt, *s.token_ids[len(of_prompt) :]]

    def _check_spans(self, s: Slice, spans: Sequence[Span]) -> None:
        """Tokens that see each other are there at once; those before the slice are computed."""
        assert not any(s.start < span.stop and span.start < s.stop < span.stop for span in spans)
        within = [Span(max(s.start, start), stop) for start, stop in spans]
        assert list(s.spans) == [each for each in within if each.start < each.stop <= s.stop]

    def _read_window(self, s: Slice) -> None:
        if self._window is None:
            assert not s.window_blocks.block_ids
            return
        seen = range(max(0, s.start - self._window + 1), s.stop)
        slots = [self._slot(s.window_blocks, position) for position in seen]
        sequence = self._states_of[s.sequence_id]
        known = [*read_by_model(sequence.spec), *sequence.token_ids[sequence.num_prompt_tokens :]]
        tokens = [*known[: s.start], *self._seen(s)]
        assert [self._window_pool[slot] for slot in slots] == tokens[seen.start :]

    def _advance_states(self, plan: StepPlan) -> None:
        slots = [s.state_slot for s in plan.slices]
        if self._num_checkpoints is None:
            assert not any(s.keep for s in plan.slices) and set(slots) <= {None}
            return
        assert len(set(slots)) == len(slots), "a slot belongs to one request"
        for s, slot in zip(plan.slices, slots, strict=True):
            assert slot is not None and slot < self._max_num_seqs
            assert list(s.keep) == sorted({p for p in s.keep if 0 < p < s.stop})
            before = {0: (), **self._states[slot]}
            tokens = (*before[s.start], *self._seen(s))
            assert tokens == tuple(self._prefix(s, s.stop)), "another request's state"
            kept = {p: tokens[:p] if p > s.start else before[p] for p in s.keep}
            assert all(state == tokens[:p] for p, state in kept.items())
            self._states[slot] = {**kept, s.stop: tokens}

    def _output(self, s: Slice) -> SliceOutput:
        sequence = self._states_of[s.sequence_id]
        self._check_adapter(s, sequence.spec.adapter)
        params = sequence.sampling
        if sequence.matcher is not None:
            assert s.num_samples <= max(1, sequence.matcher.num_free), "drafts that need masks"
        prefixes = [self._prefix(s, s.stop - i) for i in reversed(range(s.num_samples))]
        sampled = [(sequence, prefix) for prefix in prefixes]
        sampled += [(self._states_of[fork], prefixes[-1]) for fork in s.forks]
        scored = [self._prefix(s, position) for position in s.scored_positions]
        return SliceOutput(
            [self._allowed(each, self._choose(each, prefix)) for each, prefix in sampled],
            [] if params.logprobs is None else [self._named(*each) for each in sampled],
            [self._logprobs(prefix, params.prompt_logprobs or 0) for prefix in scored],
            self._vector(s, sequence),
        )

    def _check_adapter(self, s: Slice, adapter: Adapter | None) -> None:
        """All of its prefix was computed with its adapter."""
        slots = [self._slot(s.blocks, position) for position in range(s.stop)]
        assert self._adapters[s.adapter_slot] == adapter
        assert {self._written_by[slot] for slot in slots} == {adapter}

    def _allowed(self, sequence: SequenceState, token_id: int) -> int:
        """Return a token, or the first that a budget of thinking lets follow; grammars are not enforced."""
        matcher = sequence.matcher
        if not isinstance(matcher, ThinkingMatcher) or matcher.num_free:
            return token_id
        row = np.zeros(-(-self.vocab_size // 32), np.int32)
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return token_id if token_id in allowed else int(allowed[0])

    def _vector(self, s: Slice, sequence: SequenceState) -> Vector | None:
        """Keep the rows that are pooled; return the vector at the end."""
        if (params := sequence.spec.pooling) is None:
            return None
        positions = params.rows(s.start, s.stop, sequence.num_prompt_tokens)
        rows = [hidden_state(self._prefix(s, position + 1)) for position in positions]
        sequence.pooled = [*(sequence.pooled or ()), *rows]
        return array("f", _vector(sequence.pooled, params)) if s.embeds else None

    def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
        return next_token(prefix)

    def _named(self, sequence: SequenceState, prefix: list[int]) -> TokenLogprobs:
        """Return the log probability of what follows; if tokens are named, it is among them."""
        params = sequence.sampling
        logprobs = self._logprobs(prefix, params.logprobs or 0)
        if not params.logprob_token_ids:
            return logprobs
        follows = self._choose(sequence, prefix)
        named = {follows: logprobs.logprob} | {
            i: -i / 64 for i in params.logprob_token_ids if i != follows
        }
        return logprobs._replace(top=tuple(named.items()))

    def _logprobs(self, prefix: list[int], num_top: int) -> TokenLogprobs:
        return expected_logprobs(prefix, num_top)

    def _prefix(self, s: Slice, stop: int) -> list[int]:
        return [self._pool[self._slot(s.blocks, p)] for p in range(stop)]

    def _slot(self, table: BlockIds, position: int) -> int:
        index = position // self._block_size
        assert index >= table.num_dropped, "the request does not have this block any more"
        block_id = table.block_ids[index]
        return block_id * self._block_size + position % self._block_size

    def _block(self, block_id: int) -> slice:
        return slice(block_id * self._block_size, (block_id + 1) * self._block_size)


class ByteTokenizer:
    """Text as bytes modulo the fake vocabulary; enough to go there and back for ASCII 64-127."""

    has_chat_template = True
    chat_template = "{{ messages }}"
    all_special_ids: Sequence[int] = ()
    has_thinking = has_tool_calling = False
    think_start = think_end = tool_call_start = tool_call_end = None
    tool_parser = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte % VOCAB_SIZE for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(VOCAB_SIZE + token_id for token_id in token_ids).decode()

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        text = "".join(f"{m['role']}:{m['content']}\n" for m in conversation)
        text += "assistant:" * add_generation_prompt
        return self.encode(text) if tokenize else text


class FakeClock:
    """Time that passes only when a test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def request(request_id: int, num_tokens: int, max_tokens: int, **kwargs: Any) -> BatchRequest:
    """Return a request whose prompt no other request begins with."""
    prompt = [request_id, *range(num_tokens - 1)]
    return make_request(request_id, prompt, max_tokens=max_tokens, **kwargs)


def right(*requests: BatchRequest) -> bool:
    """Return whether each of the requests has the output that it would have alone."""
    return all(
        r.output_token_ids == expected_output(read_by_model(r.spec), r.spec.output_limit)
        for r in requests
    )


def trace_of(
    scheduler: ContinuousBatchingScheduler,
    requests: Sequence[BatchRequest],
    runner: TokenRunner | None = None,
    max_prefill_tokens: int | None = None,
) -> list[str]:
    """Serve requests, and return the plans; without a runner the scheduler has served none before."""
    runner = runner or TokenRunner(scheduler.config)
    for each in requests:
        scheduler.add(each)
    lines: list[str] = []
    while scheduler.has_work:
        plan = scheduler.schedule(max_prefill_tokens)
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    assert right(*requests)
    return lines


def small_config(**changes: Any) -> SchedulerConfig:
    """Return limits that a few requests of a few tokens reach."""
    limits = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    return SchedulerConfig(**{**limits, **changes})


def make_engine(
    config: SchedulerConfig,
    wrap: Callable[[TokenRunner], ModelRunner] = lambda runner: runner,
    *,
    is_pipelined: bool = False,
    clock: Callable[[], float] | None = None,
    store: FakeStore | None = None,
) -> tuple[ContinuousBatchingScheduler, BatchInferenceEngine]:
    scheduler = ContinuousBatchingScheduler(config, store)
    runner = wrap(TokenRunner(config, store))
    pipeline = Pipelined(runner) if is_pipelined else None
    clock = FakeClock() if clock is None else clock
    return scheduler, BatchInferenceEngine(scheduler, runner, clock=clock, pipeline=pipeline)


def loaded_engine(
    config: SchedulerConfig,
    tokenizer: Tokenizer,
    *,
    model_id: str = "fake",
    wrap: Callable[[TokenRunner], ModelRunner] = lambda runner: runner,
    eos_token_ids: frozenset[int] = frozenset(),
    store: BlockStore | FakeStore | None = None,
) -> LoadedEngine:
    """What an engine thread needs, over the fake runner; who gives it a store closes that."""
    scheduler = ContinuousBatchingScheduler(config, store)
    engine = BatchInferenceEngine(scheduler, wrap(TokenRunner(config, store)))
    model = ModelInfo(model_id, tokenizer, eos_token_ids, VOCAB_SIZE, config.max_request_tokens)
    return LoadedEngine(engine, model, store=store if isinstance(store, BlockStore) else None)
