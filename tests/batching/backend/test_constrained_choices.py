"""The bundled model under grammars: completions follow theirs, and the rest of the batch is not affected."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import pytest
from hypothesis import Phase, given, settings, strategies as st
from jsonschema import Draft202012Validator

from batching.backend.loader import BUNDLED_MODEL, load_model
from batching.backend.platforms.cpu.native_loader import NoNative, load_native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.constraints.grammar import Grammar, GrammarCompiler
from batching.constraints.grammar_text import json_schema_grammar
from batching.constraints.protocol import AllowedTokens, Constraint
from batching.constraints.thinking import ThinkingBudget, ThinkingLimit
from batching.inputs.sampling_params import GREEDY, SamplingParams
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import SliceOutput, StepPlan
from batching.steps.token_output import FinishReason
from tests.support.golden import GOLDEN
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request
from tests.support.schemas import SCHEMAS

pytestmark = pytest.mark.timeout(240)

MAX_TOKENS: Final = 24
NUM_FIRST_LAYERS: Final = 2


class WatchedRunner(MLXRunner):
    """Counts the drafts, and the steps that sample with and without constraints at once."""

    num_drafts = 0
    num_mixed_steps = 0

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        self.num_drafts += sum(len(s.drafts) for s in plan.slices)
        states = self._sequences.begin(plan)
        sampled = [states[s.sequence_id] for s in plan.slices if s.num_samples]
        self.num_mixed_steps += len({state.matcher is None for state in sampled}) == 2
        return super().run(plan)


class Server:
    """The model's first layers, loaded once, with the native kernels if there are any; each batch has an engine."""

    def __init__(self) -> None:
        native = load_native("auto")
        loaded = load_model(
            BUNDLED_MODEL, dtype=mx.float32 if isinstance(native, NoNative) else None
        )
        # Whatever they say must follow the grammars.
        loaded.model.model.layers = loaded.model.model.layers[:NUM_FIRST_LAYERS]
        if isinstance(native, NoNative):
            check = check_model(loaded.model, loaded.vocab_size)
        else:
            model = use_kernels(loaded.model, native)
            loaded = replace(loaded, model=model)
            check = check_model(model, loaded.vocab_size, native)
        self._loaded = loaded
        self._check = check
        self._compiler = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)

    def compile(self, schema: Any) -> Grammar:
        return self._compiler.compile(json_schema_grammar(schema), param="response_format")

    def request(
        self, case: int, sampling: SamplingParams, constraint: Constraint | None = None
    ) -> BatchRequest:
        return make_request(
            case,
            GOLDEN[case].prompt_token_ids,
            max_tokens=MAX_TOKENS,
            sampling=sampling,
            stop_token_ids=self._loaded.eos_token_ids,
            constraint=constraint,
        )

    def text(self, request: BatchRequest) -> str:
        """Return an answer without the token that ended it."""
        token_ids = [i for i in request.output_token_ids if i not in request.spec.stop_token_ids]
        text: str = self._loaded.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    def serve(self, requests: list[BatchRequest]) -> WatchedRunner:
        """Answer all requests in one batch, forks with theirs; return what ran them."""
        config = SchedulerConfig(
            num_blocks=64, max_num_seqs=16, max_draft_tokens=7, max_drafting_rows=64
        )
        cache = self._check.cache(config.num_blocks, config.block_size)
        runner = WatchedRunner(
            self._loaded.model,
            self._loaded.vocab_size,
            self._check.selection,
            cache,
            self._check.platform.sampler(),
        )
        scheduler = ContinuousBatchingScheduler(config)
        engine = BatchInferenceEngine(scheduler, runner, max_stall=1e9)
        for r in requests:
            if r.fork_of is None:
                engine.add(r, *r.forks)
        while engine.has_work:
            engine.step()
        assert scheduler.stats().num_free_blocks == config.num_blocks
        return runner


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


def neighbours(server: Server) -> list[BatchRequest]:
    """Return unconstrained requests; the first repeats itself, so its drafts are right."""
    return [
        server.request(9, GREEDY),
        server.request(10, SamplingParams(temperature=1.2, seed=1)),
        server.request(11, SamplingParams(temperature=0.8, top_k=40, seed=2, logprobs=2)),
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[list[int]]:
    """The outputs of the neighbours while no request is constrained."""
    requests = neighbours(server)
    server.serve(requests)
    return [r.output_token_ids for r in requests]


def check_answer(server: Server, request: BatchRequest, schema: Any, grammar: Grammar) -> None:
    """Fail unless each token was allowed, and the completion valid if it ended by itself."""
    matcher = grammar.matcher()
    for token_id in request.output_token_ids:
        matcher.accept(token_id)
    assert matcher.error is None
    if request.finish_reason is FinishReason.STOP:
        Draft202012Validator(schema).validate(json.loads(server.text(request)))
    else:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.num_output_tokens == MAX_TOKENS


# No shrinking: it would run the model for as long as it likes.
@given(st.lists(st.tuples(SCHEMAS, st.integers(0, 2**32)), min_size=3, max_size=3))
@settings(max_examples=1, phases=set(Phase) - {Phase.shrink, Phase.explain})
def test_a_completion_follows_its_grammar_and_the_batch_is_not_affected(
    server: Server, undisturbed: list[list[int]], asked: list[tuple[Any, int]]
) -> None:
    around = neighbours(server)
    served: list[tuple[BatchRequest, Any, Grammar]] = []
    for case, (schema, seed) in enumerate(asked):
        grammar = server.compile(schema)
        sampling = SamplingParams(temperature=1.2, seed=seed)
        served.append((server.request(case, sampling, grammar), schema, grammar))
    first, schema, grammar = served[0]
    served += [(first.fork(20 + i), schema, grammar) for i in range(2)]
    runner = server.serve([*around, *(r for r, _, _ in served)])
    for each in served:
        check_answer(server, *each)
    assert [r.output_token_ids for r in around] == undisturbed
    assert runner.num_mixed_steps > 0
    assert runner.num_drafts > 0


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_thought_is_ended_and_the_batch_is_not_affected(
    server: Server, undisturbed: list[list[int]], is_inner: bool
) -> None:
    """Drawn and greedy, with drafts up to the end; the tokens before it are those without a budget."""
    end, num_tokens = (310, 311), 6
    limit = ThinkingLimit(
        num_tokens=num_tokens,
        start=b"<",
        ends=(b">",),
        closings=((b"", end),),
        begun=b"<",
        is_first_only=True,
    )
    inner = AllowedTokens(range(1000)) if is_inner else None
    budget = ThinkingBudget(limit, inner, lambda token: b">" if token == end[-1] else b"a")
    drawn = SamplingParams(temperature=1.2, seed=5, bad_words=(end[:1],))
    made = [server.request(1, drawn, budget), server.request(9, GREEDY, budget)]
    free = [server.request(1, drawn, inner), server.request(9, GREEDY, inner)]
    forks = [made[0].fork(20), free[0].fork(20)]
    # The first one is what a budget is tried with.
    around = neighbours(server)[1:]
    server.serve([*around, *made, forks[0]])
    server.serve([*free, forks[1]])
    for limited, without in zip((*made, forks[0]), (*free, forks[1]), strict=True):
        assert limited.output_token_ids[:num_tokens] == without.output_token_ids[:num_tokens]
        assert tuple(limited.output_token_ids[num_tokens : num_tokens + 2]) == end
        assert limited.num_output_tokens == MAX_TOKENS
    assert [r.output_token_ids for r in around] == undisturbed[1:]
