"""What is asked of a model that several ranks serve, and of the same model in one process."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, cast
from unittest.mock import patch

import batching.backend  # noqa: F401  # its BLAS has to come before MLX

# isort: split
import mlx.core as mx

from batching.backend.paged.kv_cache import StepInputs
from batching.backend.runner.mlx_runner import MLXRunner
from batching.config import EngineConfig
from batching.constraints.grammar import GrammarCompiler
from batching.constraints.grammar_text import json_schema_grammar
from batching.constraints.protocol import AllowedTokens, MaskRow
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sampling_params import GREEDY, SamplingParams
from batching.pooling import PoolingParams, PoolingType
from batching.request import BatchRequest
from batching.scheduling.outputs import RequestFailure
from batching.steps.stats import SchedulerStats
from tests.support.ranks import Build
from tests.support.requests import make_request
from tests.support.small_model import cases

_SEEDED: Final = SamplingParams(temperature=0.9, top_p=0.95, seed=5, repetition_penalty=1.1)


@dataclass
class Served:
    """What came of each request, by its id.

    numbers: log probabilities, and the vectors of pooled requests.
    logits: of each row of one more request that was alone: a prompt in chunks, and what follows it.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    numbers: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    logits: list[list[float]] = field(default_factory=list)
    stats: SchedulerStats | None = None
    startup_lines: Sequence[str] = ()

    def farthest(self, other: "Served") -> float:
        """Return by how much a number differs at most from that of another run."""
        assert self.numbers.keys() == other.numbers.keys()
        pairs = [
            pair
            for key, numbers in self.numbers.items()
            for pair in zip(numbers, other.numbers[key], strict=True)
        ]
        assert len(self.logits) == len(other.logits)
        for rows in zip(self.logits, other.logits, strict=True):
            pairs += zip(*rows, strict=True)
        return max(abs(a - b) for a, b in pairs)


def serve(loaded: LoadedEngine, requests: Sequence[BatchRequest], served: Served) -> None:
    """Serve requests at once, forks with theirs."""
    engine = loaded.engine
    for request in requests:
        engine.add(request, *request.forks)
    while engine.has_work:
        for item in engine.step():
            key = item.request_id
            if isinstance(item, RequestFailure):
                served.errors[key] = str(item.error)
                continue
            output = item.output
            served.tokens.setdefault(key, []).extend(output.token_ids)
            numbers = served.numbers.setdefault(key, [])
            for each in (*output.prompt_logprobs, *output.logprobs):
                numbers += (each.logprob, *(logprob for _, logprob in each.top))
            numbers += output.embedding or ()
    served.stats = engine.stats()
    served.startup_lines = loaded.startup_lines


def serve_with_logits(loaded: LoadedEngine, request: BatchRequest, served: Served) -> None:
    """Serve a request, and note the logits of all its rows, of which rank 0 has all."""
    plain = MLXRunner.logits

    def noted(self: MLXRunner, step: StepInputs) -> mx.array:
        logits = plain(self, step)
        assert logits.dtype == mx.float32
        found.append(logits)
        return logits

    found: list[mx.array] = []
    with patch.object(MLXRunner, "logits", noted):
        serve(loaded, [request], served)
    served.logits = [row for logits in found for row in cast(list[list[float]], logits.tolist())]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(37 * i * i + 11 * i + 5 * salt) % 89 + 1 for i in range(length)]


def everything(config: EngineConfig, build: Build) -> Served:
    """Ask for all that samples, in a pool that has no room for all of it, and then for cached prefixes."""
    pooled = PoolingParams(type=PoolingType.MEAN)
    logprobs = SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=3)
    allowed = AllowedTokens([3, 7, 9])
    # What has two words only repeats itself, and is drafted.
    biased = SamplingParams(temperature=0.0, logit_bias=((5, 100.0), (9, 100.0)))
    forked = make_request(10, prompt(21, 3), max_tokens=8, sampling=_SEEDED)
    forked.fork(11)
    forked.fork(12)
    first = [
        make_request(0, prompt(50), max_tokens=24, sampling=GREEDY),
        make_request(1, prompt(41, 1), max_tokens=24, sampling=_SEEDED),
        make_request(2, 6 * prompt(5), max_tokens=24, sampling=GREEDY),
        make_request(3, prompt(30, 2), max_tokens=12, sampling=logprobs),
        make_request(4, prompt(9, 6), max_tokens=24, sampling=biased),
        make_request(5, prompt(7), max_tokens=6, sampling=GREEDY, constraint=allowed),
        make_request(6, prompt(25, 4), max_tokens=0, pooling=pooled),
        forked,
    ]
    again = SamplingParams(temperature=0.0, logprobs=2, frequency_penalty=0.5)
    served = Served()
    with closing(build(config)) as loaded:
        serve(loaded, first, served)
        for key in (20, 21):
            ask = make_request(key, [*prompt(50), key], max_tokens=8, sampling=again)
            serve(loaded, [ask], served)
        last = make_request(30, prompt(41, 5), max_tokens=6, sampling=logprobs)
        serve_with_logits(loaded, last, served)
    return served


def answers(config: EngineConfig, build: Build) -> Served:
    """Ask the small model what it is always asked, and for JSON."""
    served = Served()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with closing(build(config)) as loaded:
        model = loaded.model
        compiler = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        json_schema = compiler.compile(json_schema_grammar(schema))
        prompts = [
            model.tokenizer.apply_chat_template(case.messages, add_generation_prompt=True)
            for case in cases()
        ]
        requests = [
            make_request(i, prompts[i], max_tokens=case.num_tokens, sampling=GREEDY)
            for i, case in enumerate(cases())
        ]
        fields: dict[str, Any] = {"stop_token_ids": model.eos_token_ids, "constraint": json_schema}
        requests += [
            make_request(10, prompts[0], max_tokens=40, sampling=GREEDY, **fields),
            make_request(11, prompts[1], max_tokens=40, sampling=_SEEDED, **fields),
        ]
        serve(loaded, requests, served)
    return served


class FaultyConstraint:
    """A constraint that fails when a mask is filled."""

    is_complete = False
    error = None
    num_free = 0

    def matcher(self) -> "FaultyConstraint":
        return self

    def fill_mask(self, row: MaskRow) -> None:
        raise RuntimeError("no mask")

    def accept(self, token_id: int) -> None:
        """Nothing changes."""


def one_fails(config: EngineConfig, build: Build) -> Served:
    """Let one request of a batch fail, and serve others in the same steps and afterwards."""
    faulty: Any = FaultyConstraint()
    first = [
        make_request(0, prompt(30), max_tokens=12, sampling=GREEDY),
        make_request(1, prompt(20, 1), max_tokens=12, sampling=GREEDY, constraint=faulty),
        make_request(2, prompt(25, 2), max_tokens=12, sampling=_SEEDED),
    ]
    served = Served()
    with closing(build(config)) as loaded:
        serve(loaded, first, served)
        serve(loaded, [make_request(3, prompt(30), max_tokens=5, sampling=GREEDY)], served)
    return served


def load(config: EngineConfig, build: Build) -> Sequence[str]:
    """Build the engine only; return what it says at the start."""
    with closing(build(config)) as loaded:
        return loaded.startup_lines
