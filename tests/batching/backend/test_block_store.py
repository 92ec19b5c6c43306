"""Keys and values that outlive their engine: what is read back gives the same tokens, bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.scheduling.outputs import RequestOutput
from tests.support.model_files import write_tiny
from tests.support.requests import make_request

# Of transformers, about the configs of tiny models.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def engine_of(model: Path, folder: Path | None, **config: Any) -> LoadedEngine:
    limits = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 4, "weights_cache_gib": 0}
    settings = {"model": str(model), "model_id": "tiny", "device": "cpu", **limits, **config}
    return build_engine(EngineConfig(kv_cache_dir=folder, **settings))


def run(loaded: LoadedEngine, request: BatchRequest) -> list[float]:
    """Run a request to its end, and store what is to be; return the log probabilities of its output."""
    scores: list[float] = []
    loaded.engine.add(request)
    while loaded.engine.has_work or loaded.engine.can_step:
        for item in loaded.engine.step():
            assert isinstance(item, RequestOutput)
            scores += [each.logprob for each in item.output.logprobs]
    return scores


def asked(request_id: int, prompt: Sequence[int]) -> BatchRequest:
    sampling = SamplingParams(temperature=0, logprobs=0)
    return make_request(request_id, prompt, max_tokens=6, sampling=sampling)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_5", "lfm2"])
def test_a_prefix_is_read_in_the_next_life(model_type: str, native: Any, tmp_path: Path) -> None:
    model = write_tiny(model_type, tmp_path / "model")
    prompt = [i * 7 % 90 + 5 for i in range(50)]
    first = engine_of(model, tmp_path / "store", native=native)
    asked_first = asked(0, prompt)
    scores = run(first, asked_first)
    first.close()
    again = engine_of(model, tmp_path / "store", native=native)
    asked_again = asked(1, prompt)
    # By MLX alone the last bits depend on how a prompt is cut.
    assert run(again, asked_again) == (
        scores if native == "auto" else pytest.approx(scores, abs=1e-5)
    )
    assert asked_again.output_token_ids == asked_first.output_token_ids
    assert asked_again.num_cached_tokens == 48
    again.close()


def test_what_the_pool_evicts_stays_in_the_hosts_memory(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model")
    loaded = engine_of(model, None, num_blocks=16, kv_host_gib=0.01)
    prompts = [[(i * 7 + k) % 90 + 5 for i in range(50)] for k in range(3)]
    first = [asked(k, prompt) for k, prompt in enumerate(prompts)]
    again = [asked(10 + k, prompt) for k, prompt in enumerate(prompts)]
    scores = [run(loaded, each) for each in first]
    assert [run(loaded, each) for each in again] == scores
    assert [each.num_cached_tokens for each in again] == [48, 48, 48]
    stats = loaded.engine.stats()
    assert stats.num_evictions
    assert stats.store is not None
    assert stats.store.num_restored_tokens
    assert stats.store.host_bytes
    loaded.close()
