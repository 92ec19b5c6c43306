"""The bundled model: an answer depends on nothing but its request.

Every way of serving is compared with the golden file, hence against every other way.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import mlx.core as mx
import pytest

from batching.backend.devices import default_gpu
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.loader import BUNDLED_MODEL, LoadedModel, load_model
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.layers.scaling import scale_inputs
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import EncodingStep, MLXRunner, MLXStep
from batching.backend.self_check.checked_model import CheckedModel
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import PagedBlockManager
from batching.config import SchedulerConfig
from batching.constraints.protocol import AllowedTokens
from batching.inputs.sampling_params import GREEDY, DryParams, SamplingParams
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import StepPlan
from batching.steps.token_output import TokenLogprobs, TokenOutput
from tests.support.golden import GOLDEN, GoldenCase
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request, respec
from tests.support.serving import pipeline_of

pytestmark = pytest.mark.timeout(240)


SHORT: Final = tuple(case for case in GOLDEN if len(case.prompt_token_ids) < 200)
NUM_FIRST_LAYERS: Final = 2
# What the check at load finds, which takes seconds; the answers here would show if it was wrong.
RIGHT: Final = CheckResult(ExecutionMode.RAGGED, gathers_all=False)
# How the model is served.
PORTABLE: Final = "without native kernels"
KERNELS: Final = "with native kernels"

in_both_ways = pytest.mark.parametrize("bundled", [PORTABLE, KERNELS], indirect=True)
# Tiny models show the same of the portable pools, and a step of theirs takes a hundredth of the time.
on_kernels_first = pytest.mark.parametrize(
    "bundled", [pytest.param(PORTABLE, marks=pytest.mark.slow), KERNELS], indirect=True
)


@dataclass
class Bundled:
    """The model, loaded once; each test makes the engine it needs around it.

    golden: the cases of a full batch.  cases: a few of them, for all other tests.
    """

    loaded: LoadedModel
    check: CheckedModel
    golden: tuple[GoldenCase, ...] = tuple(case.shortened(32) for case in SHORT)
    cases: tuple[GoldenCase, ...] = tuple(SHORT[i].shortened(16) for i in (0, 2, 4, 8))
    is_pipelined: bool = True
    # How many steps were queued behind another one.
    num_following: int = 0

    def engine(
        self, config: SchedulerConfig, watch: Callable[[StepPlan], None] = lambda _: None
    ) -> tuple[ContinuousBatchingScheduler, BatchInferenceEngine]:
        cache = self.check.cache(config.num_blocks, config.block_size)
        bundled = self

        class WatchedRunner(MLXRunner):
            def submit(
                self, plan: StepPlan, after: MLXStep | None = None
            ) -> MLXStep | EncodingStep:
                watch(plan)
                bundled.num_following += after is not None
                return super().submit(plan, after)

        check, vocab_size = self.check, self.loaded.vocab_size
        model = self.loaded.model
        runner = WatchedRunner(model, vocab_size, check.selection, cache, check.platform.sampler())
        scheduler = ContinuousBatchingScheduler(config)
        # No limit in time: the chunks must not depend on how fast the machine is today.
        return scheduler, BatchInferenceEngine(
            scheduler,
            runner,
            max_stall=1e9,
            pipeline=pipeline_of(runner) if self.is_pipelined else None,
        )


class Rounding(NamedTuple):
    """Bits of inputs, whether 8 are enough where they can be scaled by channel, and keys and values.

    in_bfloat16: a matrix unit multiplies what is packed for 16 bits.
    """

    input_bits: int = 32
    is_scaled: bool = False
    kv_dtype: mx.Dtype | None = None
    in_bfloat16: bool = False

    def skip_if_unknown(self, native: Native) -> None:
        is_known = native.supports_bfloat16 or not self.in_bfloat16
        is_known &= native.min_input_bits == 8 or not self.is_scaled
        if not is_known or self.input_bits < native.min_input_bits:
            pytest.skip("this processor has no such mode")


EXACT: Final = Rounding()
ROUNDED: Final = Rounding(16)
# By default: in bfloat16, else with scaled inputs, where these are known.
BFLOAT16: Final = Rounding(16, kv_dtype=mx.bfloat16, in_bfloat16=True)
UNSCALED: Final = Rounding(16, kv_dtype=mx.bfloat16)
SCALED: Final = Rounding(16, is_scaled=True, kv_dtype=mx.bfloat16)


def with_kernels(
    native: Native, rounding: Rounding = EXACT, num_layers: int | None = None
) -> Bundled:
    rounding.skip_if_unknown(native)
    return Bundled(*on_kernels(native, rounding, num_layers))


@cache
def loaded_once() -> LoadedModel:
    return load_model(BUNDLED_MODEL, dtype=None)


@cache
def on_kernels(
    native: Native, rounding: Rounding, num_layers: int | None
) -> tuple[LoadedModel, CheckedModel]:
    plain = replace(loaded_once(), model=deepcopy(loaded_once().model))
    layers = plain.model.model.layers
    plain.model.model.layers = layers[:num_layers]
    packing = Packing(
        native.module,
        rounding.input_bits,
        finds_shifts=rounding.is_scaled,
        finds_inputs=rounding.in_bfloat16,
    )
    model = use_kernels(plain.model, native, packing=packing)
    loaded = replace(plain, model=model)
    check = check_model(model, loaded.vocab_size, native, rounding.kv_dtype, known=RIGHT)
    scale_inputs(native.module, packing.packed, packing.shifts)
    for weights in packing.of_one_input:
        native.module.use_bfloat16(weights)
    return loaded, check


@pytest.fixture(scope="module")
def bundled(request: pytest.FixtureRequest) -> Bundled:
    if request.param == KERNELS:
        return with_kernels(request.getfixturevalue("native"))
    loaded = load_model(BUNDLED_MODEL, dtype=mx.float32)
    check = check_model(loaded.model, loaded.vocab_size, known=RIGHT, gpu=default_gpu())
    golden = tuple(case.shortened(8) for case in SHORT if len(case.prompt_token_ids) < 50)
    # Of which two have drafts that are right.
    cases = tuple(SHORT[i].shortened(12) for i in (0, 4, 8))
    return Bundled(loaded, check, golden, cases)


@pytest.fixture(scope="module")
def shallow(native: Native) -> Bundled:
    """Its first layers: whether an answer depends on others shows in any of them."""
    return with_kernels(native, num_layers=NUM_FIRST_LAYERS)


@pytest.fixture(scope="module", autouse=True)
def _models_are_freed() -> Iterator[None]:
    yield
    loaded_once.cache_clear()
    on_kernels.cache_clear()


def request(request_id: int, case: GoldenCase) -> BatchRequest:
    return make_request(
        request_id, case.prompt_token_ids, max_tokens=case.max_tokens, stop_token_ids={2}
    )


def serve(
    scheduler: ContinuousBatchingScheduler,
    engine: BatchInferenceEngine,
    requests: list[BatchRequest],
) -> None:
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    assert scheduler.stats().num_free_blocks == scheduler.config.num_blocks


def serve_golden(
    scheduler: ContinuousBatchingScheduler,
    engine: BatchInferenceEngine,
    cases: Sequence[GoldenCase],
) -> list[BatchRequest]:
    requests = [request(i, case) for i, case in enumerate(cases)]
    serve(scheduler, engine, requests)
    for r, case in zip(requests, cases, strict=True):
        case.check(r.output_token_ids)
    return requests


def unlike_neighbours(num: int) -> list[BatchRequest]:
    """Prompts of random tokens and lengths, sampled hot, that come and go."""
    rng = random.Random(1)
    return [
        make_request(
            100 + i,
            [rng.randrange(1000, 40000) for _ in range(rng.randrange(1, 40))],
            max_tokens=rng.randrange(2, 12),
            sampling=SamplingParams(temperature=1.2, seed=i, frequency_penalty=0.4),
        )
        for i in range(num)
    ]


@on_kernels_first
def test_alone(bundled: Bundled) -> None:
    scheduler, engine = bundled.engine(SchedulerConfig(num_blocks=64, max_num_seqs=1))
    serve_golden(scheduler, engine, bundled.cases[::2])


@in_both_ways
def test_in_a_batch_of_16_with_unlike_neighbours(bundled: Bundled) -> None:
    sizes: list[int] = []
    config = SchedulerConfig(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=512)
    scheduler, engine = bundled.engine(config, lambda plan: sizes.append(len(plan.slices)))
    for r in unlike_neighbours(9):
        engine.add(r)
    serve_golden(scheduler, engine, bundled.golden)
    assert max(sizes) == 16


@in_both_ways
def test_with_drafts_and_preempted_by_a_small_pool(bundled: Bundled) -> None:
    """Rows of drafts are more than one token of a request, and mostly wrong."""
    drafts: list[int] = []
    config = SchedulerConfig(num_blocks=16, block_size=8, max_num_seqs=12, max_draft_tokens=7)
    scheduler, engine = bundled.engine(
        config, lambda plan: drafts.extend(len(s.drafts) for s in plan.slices if s.num_samples)
    )
    served = serve_golden(scheduler, engine, bundled.cases)
    assert max(drafts) > 1
    assert len(drafts) < sum(r.num_output_tokens for r in served), "no draft was right"
    assert scheduler.stats().num_preemptions > 0


def test_with_drafts_and_penalties(shallow: Bundled) -> None:
    """A row after drafts is penalised as if these were output."""
    dry = DryParams(multiplier=0.05, base=1.2)
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=1.05, presence_penalty=0.2, dry=dry
    )
    num_accepted: list[int] = []
    outputs: list[list[list[int]]] = []
    for max_draft_tokens in (0, 7):
        config = SchedulerConfig(num_blocks=64, max_num_seqs=2, max_draft_tokens=max_draft_tokens)
        scheduler, engine = shallow.engine(config)
        requests = [
            make_request(i, case.prompt_token_ids, max_tokens=32, sampling=sampling)
            for i, case in enumerate((GOLDEN[5], GOLDEN[9]))
        ]
        serve(scheduler, engine, requests)
        outputs.append([r.output_token_ids for r in requests])
        num_accepted.append(scheduler.stats().num_accepted_tokens)
    assert outputs[0] == outputs[1]
    assert num_accepted[0] == 0 < num_accepted[1]


@on_kernels_first
@pytest.mark.parametrize("prefill_chunk", [7, pytest.param(32, marks=pytest.mark.slow)])
def test_whatever_the_chunks_of_the_prefill(bundled: Bundled, prefill_chunk: int) -> None:
    assert_golden_in_chunks(bundled, bundled.cases, prefill_chunk)


@pytest.mark.slow
@pytest.mark.parametrize("bundled", [PORTABLE, KERNELS], indirect=True)
def test_a_long_prompt_in_chunks(bundled: Bundled) -> None:
    assert_golden_in_chunks(bundled, [case.shortened(24) for case in GOLDEN], 256)


def assert_golden_in_chunks(
    bundled: Bundled, cases: Sequence[GoldenCase], prefill_chunk: int
) -> None:
    chunks: set[int] = set()
    config = SchedulerConfig(
        num_blocks=256, max_num_seqs=12, max_num_batched_tokens=512, prefill_chunk=prefill_chunk
    )
    scheduler, engine = bundled.engine(
        config, lambda plan: chunks.update(len(s) for s in plan.slices)
    )
    serve_golden(scheduler, engine, cases)
    assert max(chunks) == prefill_chunk


@on_kernels_first
@pytest.mark.parametrize("min_copied_tokens", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_on_a_cached_prefix(bundled: Bundled, min_copied_tokens: int | None) -> None:
    config = SchedulerConfig(num_blocks=256, max_num_seqs=12, min_copied_tokens=min_copied_tokens)
    scheduler, engine = bundled.engine(config)
    cases = GOLDEN if min_copied_tokens is None else bundled.cases
    cold = serve_golden(scheduler, engine, cases)
    warm = serve_golden(scheduler, engine, cases)
    assert sum(r.num_cached_tokens for r in warm) > 0.8 * sum(r.num_prompt_tokens for r in warm)
    if min_copied_tokens is not None:
        assert all(r.num_cached_tokens == r.num_prompt_tokens - 1 for r in warm)
    for before, after in zip(cold, warm, strict=True):
        assert after.output_token_ids == before.output_token_ids


def fragment(manager: PagedBlockManager) -> None:
    """Hold every other block, so that no two free ones touch."""
    manager.release((manager.allocate(manager.num_blocks) or [])[::2])


@on_kernels_first
def test_on_scattered_blocks(bundled: Bundled) -> None:
    num_runs: list[int] = []
    config = SchedulerConfig(num_blocks=512, max_num_seqs=12)
    scheduler, engine = bundled.engine(
        config, lambda plan: num_runs.extend(len(s.blocks.runs) for s in plan.slices)
    )
    fragment(scheduler.block_manager)
    requests = [request(i, case) for i, case in enumerate(bundled.cases)]
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    for r, case in zip(requests, bundled.cases, strict=True):
        case.check(r.output_token_ids)
    # Half of the blocks are in use, to scatter the rest.
    assert scheduler.stats().num_free_blocks == config.num_blocks // 2
    assert max(num_runs) == max(-(-r.num_tokens // 32) for r in requests)


# How often a token occurred, and what may not follow, depends on the one that is on its way.
SAMPLINGS: Final = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, presence_penalty=0.7, frequency_penalty=0.4, seed=3),
    SamplingParams(temperature=0.9, repetition_penalty=1.1, min_tokens=9, top_p=0.9, seed=4),
    # The last token is the most probable to come again: counted as new, and once more.
    SamplingParams(temperature=0.8, presence_penalty=-20.0, seed=5),
    SamplingParams(temperature=5.0, frequency_penalty=-4.0, seed=6),
    SamplingParams(temperature=1.0, repetition_penalty=0.1, seed=7),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias=((28, 4.0), (260, -3.0))),
    SamplingParams(temperature=0.0, bad_words=((28, 260), (30,))),
    SamplingParams(temperature=0.0, logprobs=1, presence_penalty=0.5),
    SamplingParams(temperature=0.7, dry=DryParams(multiplier=2.0), frequency_penalty=0.2, seed=8),
    SamplingParams(temperature=0.9, typical_p=0.8, xtc_probability=0.5, min_p=0.05, seed=9),
    SamplingParams(temperature=0.8, temperature_last=True, dynatemp_range=0.4, min_p=0.1, seed=10),
]


@pytest.mark.parametrize("apart", [False, True])
def test_queued_steps_change_no_token(native: Native, *, apart: bool) -> None:
    """Together they are not queued, as one request must be read first; apart some are."""
    bundled = with_kernels(native, num_layers=NUM_FIRST_LAYERS)
    config = SchedulerConfig(num_blocks=256, max_num_seqs=1 if apart else len(SAMPLINGS))

    def serve_all() -> list[list[int]]:
        scheduler, engine = bundled.engine(config)
        prompt = GOLDEN[2].prompt_token_ids
        requests = [
            make_request(i, prompt, max_tokens=10, stop_token_ids={2}, sampling=sampling)
            for i, sampling in enumerate(SAMPLINGS)
        ]
        serve(scheduler, engine, requests)
        return [r.output_token_ids for r in requests]

    queued = serve_all()
    assert (bundled.num_following > 50) == apart
    bundled.is_pipelined = False
    assert serve_all() == queued


def test_masks_of_others_leave_the_penalty_of_the_token_on_its_way(native: Native) -> None:
    """The first token of a constrained request is sampled in a step that was queued."""
    bundled = with_kernels(native, num_layers=NUM_FIRST_LAYERS)
    # It likes what it said last, or never says it again.
    samplings = [
        SamplingParams(temperature=1.0, presence_penalty=penalty, frequency_penalty=0.1, seed=seed)
        for penalty in (-20.0, 20.0)
        for seed in range(3)
    ]
    config = SchedulerConfig(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)

    def serve_all() -> list[list[int]]:
        scheduler, engine = bundled.engine(config)
        allowed = AllowedTokens([5, 6])
        # Its prompt is read in the step behind the first tokens of the others.
        constrained = make_request(9, [3] * 70, max_tokens=1, constraint=allowed, arrival_time=1.0)
        requests = [
            make_request(i, [1, 500 + i], max_tokens=5, sampling=sampling)
            for i, sampling in enumerate(samplings)
        ]
        serve(scheduler, engine, [*requests, constrained])
        return [r.output_token_ids for r in (*requests, constrained)]

    queued = serve_all()
    assert bundled.num_following > 1
    bundled.is_pipelined = False
    assert serve_all() == queued


def sampled(request_id: int) -> BatchRequest:
    return make_request(
        request_id,
        GOLDEN[2].prompt_token_ids,
        max_tokens=8,
        stop_token_ids={2},
        sampling=SamplingParams(
            temperature=0.8,
            temperature_last=True,
            dynatemp_range=0.2,
            top_p=0.98,
            typical_p=0.97,
            xtc_probability=0.3,
            dry=DryParams(multiplier=1.0),
            seed=1234,
        ),
    )


def test_a_seeded_request_draws_the_same_alone_and_in_a_batch(shallow: Bundled) -> None:
    scheduler, engine = shallow.engine(SchedulerConfig(num_blocks=256, max_num_seqs=16))
    alone, together = sampled(0), sampled(1)
    serve(scheduler, engine, [alone])
    serve(scheduler, engine, [*unlike_neighbours(5), together])
    assert alone.output_token_ids == together.output_token_ids
    greedy = make_request(2, GOLDEN[2].prompt_token_ids, max_tokens=8, sampling=GREEDY)
    serve(scheduler, engine, [greedy])
    assert alone.output_token_ids != greedy.output_token_ids


def drawing(request_id: int) -> BatchRequest:
    sampling = SamplingParams(
        temperature=0.9, top_k=20, xtc_probability=0.3, dry=DryParams(multiplier=1.0), seed=77
    )
    return make_request(
        request_id, GOLDEN[2].prompt_token_ids, max_tokens=12, stop_token_ids={2}, sampling=sampling
    )


def test_forks_sample_as_if_each_had_prefilled_the_prompt(shallow: Bundled) -> None:
    assert_forks_sample_as_singles(shallow)


def assert_forks_sample_as_singles(bundled: Bundled) -> None:
    """They share the prompt's blocks, and copy the last one."""
    rows: list[int] = []
    scheduler, engine = bundled.engine(SchedulerConfig(num_blocks=256, max_num_seqs=16))
    alone = drawing(0)
    serve(scheduler, engine, [alone])
    scheduler, engine = bundled.engine(
        SchedulerConfig(num_blocks=256, max_num_seqs=16), lambda plan: rows.append(plan.num_tokens)
    )
    made = drawing(1)
    forks = [made.fork(2 + i) for i in range(3)]
    engine.add(made, *forks)
    while engine.has_work:
        engine.step()
    assert rows[:2] == [made.num_prompt_tokens, 4]
    assert made.output_token_ids == alone.output_token_ids
    assert len({tuple(r.output_token_ids) for r in (made, *forks)}) == 4
    for i, fork in enumerate(forks):
        single = drawing(10 + i)
        single.seed = fork.seed
        serve(scheduler, engine, [single])
        assert single.output_token_ids == fork.output_token_ids


class Collector:
    """Collects the outputs of an engine."""

    def __init__(self, engine: BatchInferenceEngine) -> None:
        self.outputs: dict[int, list[TokenOutput]] = {}
        while engine.has_work:
            for request_id, output in engine.step():
                assert isinstance(output, TokenOutput)
                self.outputs.setdefault(request_id, []).append(output)

    def logprobs(self, request_id: int) -> list[TokenLogprobs]:
        return [each for output in self.outputs[request_id] for each in output.logprobs]


@on_kernels_first
@pytest.mark.parametrize("max_draft_tokens", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_log_probabilities_are_the_golden_ones(bundled: Bundled, max_draft_tokens: int) -> None:
    """Of the raw distribution, whatever the sampling made of it."""
    config = SchedulerConfig(num_blocks=256, max_num_seqs=3, max_draft_tokens=max_draft_tokens)
    _, engine = bundled.engine(config)
    for i, case in enumerate(bundled.cases):
        made = request(i, case)
        respec(made, sampling=SamplingParams(temperature=0.0, logprobs=2))
        engine.add(made)
    collector = Collector(engine)
    for i, case in enumerate(bundled.cases):
        logprobs = collector.logprobs(i)
        assert [each.logprob for each in logprobs] == pytest.approx(case.logprobs, abs=1e-3)
        assert [each.top[0][0] for each in logprobs] == case.completion_token_ids


@on_kernels_first
def test_log_probabilities_of_a_prompt_are_those_of_its_tokens_as_output(
    bundled: Bundled,
) -> None:
    """Also in chunks, beside neighbours, and on a cached prefix; penalties change none."""
    case = GOLDEN[2]
    config = SchedulerConfig(num_blocks=256, max_num_seqs=8, prefill_chunk=7)
    _, engine = bundled.engine(config)
    prompt = [*case.prompt_token_ids, *case.completion_token_ids]
    for r in unlike_neighbours(3):
        engine.add(r)
    sampling = SamplingParams(prompt_logprobs=1, repetition_penalty=1.5, logit_bias=((5, 50.0),))
    for request_id in (0, 1):
        engine.add(make_request(request_id, prompt, max_tokens=1, sampling=sampling))
    collector = Collector(engine)
    for request_id in (0, 1):
        (output,) = collector.outputs[request_id]
        assert len(output.prompt_logprobs) == len(prompt) - 1
        answer = output.prompt_logprobs[len(case.prompt_token_ids) - 1 :]
        assert [each.logprob for each in answer] == pytest.approx(case.logprobs, abs=1e-3)


def test_a_constraint_is_kept_to_in_a_mixed_batch(shallow: Bundled) -> None:
    scheduler, engine = shallow.engine(SchedulerConfig(num_blocks=256, max_num_seqs=16))
    allowed = set(range(500, 540))
    made = [drawing(i) for i in range(3)]
    for r in made:
        respec(r, constraint=AllowedTokens(allowed))
    forks = [made[0].fork(10 + i) for i in range(2)]
    for r in unlike_neighbours(3):
        engine.add(r)
    engine.add(made[0], *forks)
    serve(scheduler, engine, made[1:])
    for r in (*made, *forks):
        assert set(r.output_token_ids) <= allowed
        assert r.num_output_tokens == r.spec.output_limit


def agreement(bundled: Bundled) -> tuple[int, list[float]]:
    """Return how many of the short golden texts come out, and by how much the golden logprobs are missed."""
    answers = [request(i, case) for i, case in enumerate(SHORT)]
    serve(*bundled.engine(SchedulerConfig(num_blocks=256)), answers)
    pairs = zip(answers, SHORT, strict=True)
    num_same = sum(r.output_token_ids == c.completion_token_ids for r, c in pairs)
    _, engine = bundled.engine(SchedulerConfig(num_blocks=256))
    sampling = SamplingParams(prompt_logprobs=1)
    for i, case in enumerate(SHORT):
        prompt = [*case.prompt_token_ids, *case.completion_token_ids]
        engine.add(make_request(i, prompt, max_tokens=1, sampling=sampling))
    collector = Collector(engine)
    differences: list[float] = []
    for i, case in enumerate(SHORT):
        (output,) = collector.outputs[i]
        answer = output.prompt_logprobs[len(case.prompt_token_ids) - 1 :]
        by_token = zip(answer, case.logprobs, strict=True)
        differences += [abs(each.logprob - logprob) for each, logprob in by_token]
    return num_same, differences


@pytest.mark.parametrize(
    "rounding",
    [
        BFLOAT16,
        SCALED,
        EXACT,
        pytest.param(UNSCALED, marks=pytest.mark.slow),
        pytest.param(Rounding(16, kv_dtype=mx.int8), marks=pytest.mark.slow),
        pytest.param(ROUNDED, marks=pytest.mark.slow),
    ],
)
def test_with_kernels_no_bit_of_the_output_depends_on_anything_but_the_request(
    native: Native, rounding: Rounding
) -> None:
    """A difference, however small, might be rounded to a large one."""
    bundled = with_kernels(native, rounding, NUM_FIRST_LAYERS)
    # Two that soon need another block, which is one of the third's in a small pool.
    cases = [SHORT[i].shortened(12) for i in (9, 10, 4)]

    def logprobs(
        config: SchedulerConfig, neighbours: Sequence[BatchRequest] = ()
    ) -> list[list[TokenLogprobs]]:
        """Of the cases; twice, the second time on a cached prefix."""
        scheduler, engine = bundled.engine(config)
        found: list[list[list[TokenLogprobs]]] = []
        for r in neighbours:
            engine.add(r)
        for _ in range(2):
            for i, case in enumerate(cases):
                made = request(i, case)
                respec(made, sampling=SamplingParams(temperature=0.0, logprobs=2))
                engine.add(made)
            collector = Collector(engine)
            found.append([collector.logprobs(i) for i in range(len(cases))])
        assert found[0] == found[1]
        assert (scheduler.stats().num_preemptions > 0) == (config.num_blocks < 100)
        return found[0]

    alone = logprobs(SchedulerConfig(num_blocks=256, max_num_seqs=1))
    chunked = SchedulerConfig(num_blocks=256, max_num_seqs=16, prefill_chunk=7, min_copied_tokens=1)
    assert logprobs(chunked, unlike_neighbours(3)) == alone
    small = SchedulerConfig(num_blocks=5, max_num_seqs=6, max_draft_tokens=7)
    assert logprobs(small) == alone
    assert_forks_sample_as_singles(bundled)


# How many texts come out and by how much a token's log probability is off depend on a processor's last bits:
# the bounds are those of a fault, above what different processors were seen to give.
@pytest.mark.parametrize(
    ("rounding", "num_texts", "mean"),
    [
        # bfloat16, in vLLM, is off by 0.0153.
        (BFLOAT16, 6, 0.0153),
        # 0.0134 to 0.0157; the highest of a processor whose default is another, as of the next.
        (SCALED, 4, 0.018),
        pytest.param(UNSCALED, 6, 0.006, marks=pytest.mark.slow),
        pytest.param(ROUNDED, 10, 0.0006, marks=pytest.mark.slow),
        pytest.param(Rounding(kv_dtype=mx.bfloat16), 6, 0.006, marks=pytest.mark.slow),
        pytest.param(Rounding(kv_dtype=mx.int8), 6, 0.0153, marks=pytest.mark.slow),
        pytest.param(Rounding(16, kv_dtype=mx.int8), 6, 0.0153, marks=pytest.mark.slow),
    ],
)
def test_rounded_inputs_and_keys_stay_near_the_golden_logprobs(
    native: Native, rounding: Rounding, num_texts: int, mean: float
) -> None:
    num_same, differences = agreement(with_kernels(native, rounding))
    assert num_same >= num_texts
    assert sum(differences) / len(differences) < mean
    # No token by itself is lost, which the mean of 419 might hide.
    assert max(differences) < 20 * mean
