"""A fault ends the requests that it concerns; all others get the same tokens as without it."""

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.backend.execution_mode import ExecutionMode
from batching.backend.runner.mlx_runner import EncodingStep, MLXRunner, MLXStep
from batching.backend.sampling.logit_rows import LogitRows, Sample
from batching.backend.sampling.sampler import Sampler
from batching.backend.sampling.slice_sampler import SliceSampler
from batching.backend.sampling.token_masks import MaskFiller
from batching.backend.self_check.checked_model import CheckedModel
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.constraints.protocol import AllowedTokens, MaskRow
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestFailure
from batching.steps.model_runner import SlicesFailed
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.platforms import check_model
from tests.support.requests import make_request, respec, slice_of, states_of
from tests.support.tiny_models import (
    DEVICE_KINDS,
    VOCAB_SIZE,
    Check,
    insist_on_own_caches,
    tiny_model,
)
from tests.support.weekly import weekly_pairs

NUM_TOKENS: Final = 10
# A token that no healthy prompt has, and that the model does not say: see `poisoned_model`.
POISON: Final = VOCAB_SIZE - 1
RNG: Final = np.random.default_rng(11)
PROMPTS: Final = [RNG.integers(0, POISON, size).tolist() for size in (1, 6, 19, 23, 9, 40)]
CONFIG: Final = SchedulerConfig(
    num_blocks=64, block_size=4, max_num_seqs=5, max_num_batched_tokens=24, prefill_chunk=7
)

WITH_STATES: Final = replace(CONFIG, num_checkpoints=4)


def memory_in_use() -> int:
    """Without what other tests left to the garbage collector."""
    gc.collect()
    return int(mx.get_active_memory())


class Panic(BaseException):
    """What pyo3 makes of a panic of Rust: no Exception."""


class Broken(AllowedTokens):
    """A constraint that fails to fill its mask, from some token on."""

    def __init__(self, error: BaseException, num_good: int = 0) -> None:
        super().__init__(range(VOCAB_SIZE))
        self._error = error
        self._num_left = num_good

    def fill_mask(self, row: MaskRow) -> None:
        if self._num_left <= 0:
            raise self._error
        super().fill_mask(row)

    def accept(self, token_id: int) -> None:
        self._num_left -= 1


def healthy(constraint: AllowedTokens | None = None) -> list[BatchRequest]:
    """Unlike requests; all their answers depend on nothing but themselves."""
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.5)
    logprobs = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    kinds = [SamplingParams(temperature=0.0), seeded, logprobs] * 2
    return [
        make_request(i, p, max_tokens=NUM_TOKENS, sampling=sampling, constraint=constraint)
        for i, (p, sampling) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


@dataclass
class Served:
    answers: dict[int, list[int]]
    failed: set[int]
    num_resets: int


@dataclass
class Kit:
    """One model, hooked once, and runners over pools of their own."""

    model: nn.Module
    check: CheckedModel
    # Called as a step begins, and as the model runs.
    before_step: Callable[[StepPlan], None] = field(default=lambda _: None)
    in_model: Callable[[], None] = field(default=lambda: None)

    def runner(self, config: SchedulerConfig = CONFIG) -> MLXRunner:
        kit = self

        class Watched(MLXRunner):
            def submit(
                self, plan: StepPlan, after: MLXStep | None = None
            ) -> MLXStep | EncodingStep:
                kit.before_step(plan)
                return super().submit(plan, after)

        cache = self.check.cache(config.num_blocks, config.block_size)
        cache.reset()
        model, selection = self._model_that_may_fail(), self.check.selection
        return Watched(model, VOCAB_SIZE, selection, cache, self.check.platform.sampler())

    def _model_that_may_fail(self) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = self.model(*args, **kwargs)
            self.in_model()
            return output

        return run


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    on_a_pool: Check = check_model
    if "device_kind" in request.fixturenames:
        on_a_pool = request.getfixturevalue("device_kind")
    return new_kit(on_a_pool)


def new_kit(check_on_a_pool: Check = check_model) -> Kit:
    """Return a model of which one token is damaged, as by a bad byte in its file."""
    model = tiny_model("qwen3")
    model.lm_head.weight[POISON] = 0
    return damaged_kit(model, model.model.embed_tokens, check_on_a_pool)


def damaged_kit(
    model: nn.Module, embedding: nn.Embedding, check_on_a_pool: Check = check_model
) -> Kit:
    embedding.weight[POISON] = mx.nan
    mx.eval(model.parameters())
    return Kit(model, check_on_a_pool(model, VOCAB_SIZE))


STATEFUL_WAYS: Final = (ExecutionMode.PIECES, ExecutionMode.OWN)


@pytest.fixture(params=STATEFUL_WAYS)
def stateful_kit(request: pytest.FixtureRequest) -> Kit:
    """A recurrent model on the pool, and one on cache objects of its own."""
    return replace(stateful(request.param))


@cache
def stateful(way: ExecutionMode) -> Kit:
    model = tiny_model("mamba")
    model.lm_head.weight[POISON] = 0
    if way is ExecutionMode.OWN:
        insist_on_own_caches(model)
    kit = damaged_kit(model, model.backbone.embeddings)
    assert kit.check.mode == way
    return kit


@cache
def served_with_a_state(way: ExecutionMode) -> Served:
    """Return what requests get that nothing disturbs."""
    served = serve(stateful(way).runner(), healthy(), WITH_STATES)
    assert not served.failed
    return served


def serve(
    runner: MLXRunner, requests: list[BatchRequest], config: SchedulerConfig = CONFIG
) -> Served:
    scheduler = ContinuousBatchingScheduler(config)
    resets: list[None] = []
    reset = runner.reset

    def counted_reset() -> None:
        resets.append(None)
        reset()

    runner.reset = counted_reset  # type: ignore[method-assign]
    engine = BatchInferenceEngine(scheduler, runner, max_stall=1e9, pipeline=runner)
    for r in requests:
        if r.fork_of is None:
            engine.add(r, *r.forks)
    failed: set[int] = set()
    while engine.has_work:
        failed |= {item.request_id for item in engine.step() if isinstance(item, RequestFailure)}
    assert scheduler.stats().num_free_blocks == config.num_blocks
    answers = {r.request_id: r.output_token_ids for r in requests if r.request_id not in failed}
    return Served(answers, failed, len(resets))


def poisoned(prompt: list[int], **fields: Any) -> BatchRequest:
    return make_request(99, prompt, max_tokens=NUM_TOKENS, **fields)


DAMAGED: Final = [*PROMPTS[2][:5], POISON, *PROMPTS[5]]
OUT_OF_RANGE: Final = SamplingParams(temperature=0.0, logit_bias=((VOCAB_SIZE + 3, 5.0),))

POISONS: Final[dict[str, Callable[[], BatchRequest]]] = {
    "a damaged token at the end of its prompt": lambda: poisoned([*PROMPTS[1], POISON]),
    "a damaged token long before the end of its prompt": lambda: poisoned(DAMAGED),
    "a constraint that raises": lambda: poisoned(PROMPTS[3], constraint=Broken(ValueError("x"))),
    "a constraint that panics": lambda: poisoned(PROMPTS[3], constraint=Broken(Panic("x"))),
    "a constraint that panics later": lambda: poisoned(PROMPTS[3], constraint=Broken(Panic(), 4)),
    "a bias beyond the vocabulary": lambda: poisoned(PROMPTS[4], sampling=OUT_OF_RANGE),
}


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize(
    ("device_kind", "poison", "are_constrained"),
    weekly_pairs(DEVICE_KINDS, POISONS, [False, True]),
    indirect=["device_kind"],
)
def test_a_poisoned_request_fails_alone(kit: Kit, poison: str, are_constrained: bool) -> None:
    constraint = AllowedTokens(range(POISON)) if are_constrained else None
    expected = serve(kit.runner(), healthy(constraint))
    assert not expected.failed
    requests = healthy(constraint)
    requests.insert(2, POISONS[poison]())
    served = serve(kit.runner(), requests)
    assert served.failed == {99}
    assert served.answers == expected.answers
    assert served.num_resets == 1


def test_the_forks_of_a_poisoned_request_fail_with_it(kit: Kit) -> None:
    expected = serve(kit.runner(), healthy())
    made = poisoned(PROMPTS[3], constraint=Broken(Panic()))
    forks = [made.fork(100 + i) for i in range(2)]
    served = serve(kit.runner(), [*healthy(), made, *forks])
    assert served.failed == {99, 100, 101}
    assert served.answers == expected.answers


@pytest.mark.usefixtures("device_kind")
def test_a_damaged_token_fails_its_request_before_the_prompt_is_read(kit: Kit) -> None:
    """Else a request that is aborted meanwhile would leave it in blocks that are used again."""
    request = poisoned(DAMAGED)
    scheduler = ContinuousBatchingScheduler(CONFIG)
    engine = BatchInferenceEngine(scheduler, kit.runner())
    engine.add(request)
    assert [type(item) for item in engine.step()] == [RequestFailure]
    assert request.num_computed_tokens == 0


class FailsOnce:
    """Raises in its fourth call."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._num_calls = 0

    def __call__(self, *_: object) -> None:
        self._num_calls += 1
        if self._num_calls == 4:
            raise self._error


def fail_in_layer(model: nn.Module, fail: FailsOnce) -> None:
    layer = model.layers[1]
    layer_type = type(layer)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = layer_type.__call__(self, *args, **kwargs)
        fail()
        return output

    layer.__class__ = type("Failing", (layer_type,), {"__call__": call})


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize(
    ("device_kind", "place", "error"),
    weekly_pairs(
        DEVICE_KINDS,
        ["before the model", "in a layer", "behind the last layer"],
        [RuntimeError("no memory"), ValueError("a shape"), MemoryError()],
    ),
    indirect=["device_kind"],
)
def test_a_forward_pass_that_raises_ends_its_step_only(
    kit: Kit, place: str, error: Exception
) -> None:
    config = replace(CONFIG, max_num_seqs=2)
    expected = serve(kit.runner(config), healthy(), config)
    fail = FailsOnce(error)
    if place == "before the model":
        kit.before_step = fail
    elif place == "in a layer":
        fail_in_layer(kit.model, fail)
    else:
        kit.in_model = fail
    served = serve(kit.runner(config), healthy(), config)
    assert 0 < len(served.failed) <= 2
    assert served.num_resets == 1
    assert served.answers.items() <= expected.answers.items()


class Chaos:
    """Raises in random steps, at random places."""

    def __init__(self, seed: int, share: float) -> None:
        self._random = random.Random(seed)
        self._share = share
        self.num_raised = 0

    def __call__(self, *_: object) -> None:
        if self._random.random() < self._share:
            self.num_raised += 1
            raise self._random.choice([RuntimeError("no memory"), ValueError(), MemoryError()])


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize(
    ("device_kind", "seed"), weekly_pairs(DEVICE_KINDS, range(4)), indirect=["device_kind"]
)
def test_whatever_fails_at_random_steps_the_others_get_the_same_tokens(kit: Kit, seed: int) -> None:
    expected = serve(kit.runner(), healthy()).answers
    kit.before_step = Chaos(seed, 0.02)
    kit.in_model = Chaos(seed + 1, 0.04)
    pick = random.Random(seed)
    requests: list[BatchRequest] = []
    for turn in range(5):
        for r in healthy():
            r.request_id += 10 * turn
            requests.append(r)
        request = POISONS[pick.choice(list(POISONS))]()
        request.request_id = 1000 + turn
        requests.insert(pick.randrange(len(requests)), request)
    served = serve(kit.runner(), requests)
    assert served.failed >= {1000 + turn for turn in range(5)}
    assert kit.in_model.num_raised > 0
    assert len(served.answers) >= 5
    for request_id, answer in served.answers.items():
        assert answer == expected[request_id % 10]


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize(
    ("device_kind", "kind"),
    weekly_pairs(DEVICE_KINDS, ["the model", "a request"]),
    indirect=["device_kind"],
)
def test_failures_leave_no_memory_behind(kit: Kit, kind: str) -> None:
    def failing_once(runner: MLXRunner) -> None:
        kit.in_model = Chaos(0, 1.0) if kind == "the model" else lambda: None
        constraint = Broken(Panic()) if kind == "a request" else None
        served = serve(runner, [poisoned(PROMPTS[5], constraint=constraint)])
        assert served.failed == {99}

    runner = kit.runner()
    failing_once(runner)
    before = memory_in_use() + mx.get_cache_memory()
    for _ in range(20):
        failing_once(runner)
        used = mx.get_active_memory() + mx.get_cache_memory()
    # What other tests' garbage took may be freed meanwhile; little of this one's is new.
    assert used <= before + 16384


def test_the_pool_is_made_again_without_the_old_one_beside_it(kit: Kit) -> None:
    """Else an allocation that failed would fail again, and the engine with it."""
    config = SchedulerConfig(num_blocks=4096, block_size=32)
    runner = kit.runner(config)
    pool = 4096 * 32 * kit.check.layout.bytes_per_token
    before = memory_in_use()
    kit.in_model = Chaos(0, 1.0)
    mx.reset_peak_memory()
    assert serve(runner, [poisoned(PROMPTS[5])], config).failed == {99}
    assert mx.get_peak_memory() < before + pool / 4
    assert memory_in_use() <= before + 4096


# Models with a state


@pytest.mark.parametrize(
    ("stateful_kit", "poison"), weekly_pairs(STATEFUL_WAYS, POISONS), indirect=["stateful_kit"]
)
def test_a_poisoned_request_of_a_model_with_a_state_fails_alone(
    stateful_kit: Kit, poison: str
) -> None:
    expected = served_with_a_state(stateful_kit.check.mode)
    requests = healthy()
    requests.insert(2, POISONS[poison]())
    served = serve(stateful_kit.runner(), requests, WITH_STATES)
    assert served.failed == {99}
    assert served.answers == expected.answers


def test_a_model_with_a_state_recovers_from_what_raises_in_it(stateful_kit: Kit) -> None:
    expected = served_with_a_state(stateful_kit.check.mode)
    stateful_kit.in_model = chaos = Chaos(3, 0.05)
    served = serve(stateful_kit.runner(), healthy(), WITH_STATES)
    assert chaos.num_raised > 0
    assert served.failed
    assert served.answers
    assert served.answers.items() <= expected.answers.items()


def test_no_state_is_left_after_a_reset(stateful_kit: Kit) -> None:
    runner = stateful_kit.runner()
    before = memory_in_use()
    serve(runner, healthy(), WITH_STATES)
    assert memory_in_use() > before + 4096
    runner.reset()
    assert memory_in_use() <= before + 64


# Which requests are at fault


@dataclass
class Step:
    """Logits of a step in which each of some requests samples one token."""

    requests: list[BatchRequest]
    sampler: SliceSampler = field(default_factory=lambda: SliceSampler(VOCAB_SIZE))

    def __post_init__(self) -> None:
        self.slices = [slice_of(r, r.num_tokens - 1, r.num_tokens) for r in self.requests]
        self.logits = mx.random.normal((len(self.requests), VOCAB_SIZE))

    def run(self, written: list[mx.array] | None = None) -> list[SliceOutput]:
        rows, states = LogitRows.of(self.slices), states_of(self.requests)
        with (
            self.sampler.masks(rows, states) as masks,
            self.sampler.isolate_failures(self.slices, states, self.logits, written or []),
        ):
            sampled = self.sampler.sample(rows, states, self.logits, masks)
            mx.eval(sampled.tokens, written or [])
            return self.sampler.outputs(self.slices, states, rows, self.logits, sampled)


def test_only_requests_whose_rows_are_not_finite_fail() -> None:
    step = Step(healthy())
    step.logits[2] = mx.nan
    step.logits[4] = mx.inf
    with pytest.raises(SlicesFailed) as caught:
        step.run()
    assert caught.value.request_ids == {2, 4}
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_several_requests_can_be_at_fault() -> None:
    requests = healthy()
    respec(requests[1], constraint=Broken(Panic("x")))
    respec(requests[3], sampling=OUT_OF_RANGE)
    with pytest.raises(SlicesFailed) as caught:
        Step(requests).run()
    assert caught.value.request_ids == {1, 3}
    assert caught.value.__cause__ is not None


def test_logprobs_that_are_not_finite_fail_the_request_for_them() -> None:
    """The head overflowed at a token of a prompt, and not where an answer goes on."""
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    requests = [make_request(i, [1, 2, 3], max_tokens=2, sampling=sampling) for i in range(3)]
    step = Step(requests)
    # Two tokens of each prompt are scored, and one is sampled.
    step.slices = [slice_of(r, 0, 3) for r in requests]
    step.logits = mx.random.normal((9, VOCAB_SIZE))
    assert len(step.run()) == 3
    step.logits[4, 7] = mx.inf
    # A server does not stop at a warning of numpy's, as a test does.
    with np.errstate(all="ignore"), pytest.raises(SlicesFailed) as caught:
        step.run()
    assert caught.value.request_ids == {1}


def test_the_choices_of_one_prompt_fail_together() -> None:
    requests = healthy()[:3]
    requests[1].fork(7)
    fork = requests[1].fork(8)
    respec(fork, constraint=Broken(Panic("x")))
    step = Step(requests)
    step.slices[1] = replace(step.slices[1], forks=(7, 8))
    with pytest.raises(SlicesFailed) as caught:
        step.run()
    assert caught.value.request_ids == {1, 7, 8}


def test_if_no_request_fails_alone_the_error_is_raised_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = Sampler.sample

    def fail_together(self: Sampler, logits: mx.array, *rest: Any) -> Any:
        if len(logits) > 1:
            raise MemoryError("too much at once")
        return sample(self, logits, *rest)

    monkeypatch.setattr(Sampler, "sample", fail_together)
    with pytest.raises(MemoryError, match="too much at once"):
        Step(healthy()).run()


def test_if_the_forward_pass_failed_no_request_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device it runs when it is evaluated, which is as the first row is sampled."""
    step = Step(healthy())
    evaluate = mx.eval

    def fail_for_it(*arrays: Any) -> None:
        if any(step.logits is array for array in arrays):
            raise RuntimeError("out of memory")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", fail_for_it)
    monkeypatch.setattr(Sampler, "sample", lambda *_: fail_for_it(step.logits))
    with pytest.raises(RuntimeError, match="out of memory"):
        step.run()


def test_no_constraint_is_at_work_when_a_step_has_failed() -> None:
    """It would run beside the next use of the constraint."""
    has_failed = threading.Event()
    done: list[int] = []

    class Slow(AllowedTokens):
        def fill_mask(self, row: MaskRow) -> None:
            has_failed.wait()
            # Longer than a thread may run at a stretch.
            done.append(sum(range(3_000_000)))

    def fail() -> None:
        has_failed.set()
        raise RuntimeError("the model")

    request = make_request(0, [1], max_tokens=2, constraint=Slow([1]))
    with pytest.raises(RuntimeError, match="the model"):
        with MaskFiller(VOCAB_SIZE).filling([Sample(0, 1)], states_of([request])):
            fail()
    assert done
