"""Processes that serve parts of a model answer as one that serves all of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoTokenizer

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from tests.support import rank_faults
from tests.support.gguf_models import BPE, blocks, metadata_of, random_model, tensors_of
from tests.support.gguf_writer import Q4_0, write_gguf
from tests.support.model_files import write_model, write_tiny
from tests.support.rank_scenarios import Served, answers, everything, one_fails
from tests.support.ranks import Job, RankRun, run_ranks
from tests.support.small_model import cases, small_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

# Dense, a mixture of experts, latents, a recurrent state, windows with sinks and experts, and windows.
TYPES: Final = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_5", "gpt_oss", "mistral")
MODELS: Final = (*TYPES, "gguf", "quantized")
LOGITS: Final = 1e-4


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    folder = tmp_path_factory.mktemp("models")
    paths = {name: write_tiny(name, folder / name) for name in TYPES}
    paths["quantized"] = write_model(
        folder / "quantized",
        torch_dtype="float32",
        intermediate_size=128,
        vocab_size=101,
        tie_word_embeddings=True,
    )
    model, config = random_model("llama", hidden_size=256, vocab_size=262)
    tensors = tensors_of(model, config)
    tensors["blk.0.ffn_up.weight"], _ = blocks(Q4_0, (96, 256), 1)
    paths["gguf"] = write_gguf(folder / "model.gguf", BPE | metadata_of(config), tensors)
    return {name: config_of(path) for name, path in paths.items()}


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(path),
        model_id="tiny",
        device="cpu",
        num_blocks=20,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        prefill_chunk=16,
    )


@pytest.fixture(scope="module")
def ranks(
    configs: dict[str, EngineConfig], tmp_path_factory: pytest.TempPathFactory
) -> list[RankRun]:
    jobs = [Job(everything, configs[name], faults=kept_as(name)) for name in MODELS]
    jobs += [Job(one_fails, configs["llama"]), Job(answers, small())]
    return run_ranks(tmp_path_factory.mktemp("ranks"), jobs)


def small() -> EngineConfig:
    return replace(config_of(small_model()), num_blocks=64)


def kept_as(name: str) -> dict[int, Callable[[], AbstractContextManager[None]]]:
    """Return how each rank keeps the weights of a model."""
    return dict.fromkeys(range(2), rank_faults.weights_as_stored) if name == "quantized" else {}


def alone(config: EngineConfig) -> EngineConfig:
    """Return the configuration of one process that computes as ranks do."""
    return replace(config, native="off")


# Of transformers, for a field in the published configs of Qwen3.5.
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_same_and_logits_nearly(
    name: str, configs: dict[str, EngineConfig], ranks: list[RankRun]
) -> None:
    found: Served = ranks[0].results[MODELS.index(name)]
    assert isinstance(found, Served), f"{found}: {ranks[1].stderr}"
    with kept_as(name).get(0, nullcontext)():
        expected = everything(alone(configs[name]), build_engine)
    assert found.tokens == expected.tokens
    assert found.errors == expected.errors == {}
    assert found.farthest(expected) < LOGITS
    stats = found.stats
    assert stats is not None
    assert stats.num_preemptions
    # Blocks in windows may have been given to others meanwhile.
    assert stats.num_hit_tokens or stats.num_window_missed_tokens
    assert stats.num_drafts
    assert len(found.logits) == 41 + 5


def test_three_ranks_answer_as_one_process(tmp_path: Path) -> None:
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    path = write_model(tmp_path / "thirds", torch_dtype="float32", vocab_size=101, **heads)
    config = config_of(path)
    ranks = run_ranks(tmp_path, [Job(everything, config)], num_ranks=3)
    assert [rank.status for rank in ranks] == [0, 0, 0], [rank.stderr for rank in ranks]
    (found,) = ranks[0].results
    assert isinstance(found, Served), found
    expected = everything(alone(config), build_engine)
    assert found.tokens == expected.tokens
    assert found.errors == {}
    assert found.farthest(expected) < LOGITS


def test_a_request_fails_alone(configs: dict[str, EngineConfig], ranks: list[RankRun]) -> None:
    found: Served = ranks[0].results[len(MODELS)]
    expected = one_fails(alone(configs["llama"]), build_engine)
    assert found.errors.keys() == {1}
    assert found.tokens == expected.tokens


def test_answers_are_those_of_mlx_lm_and_follow_a_schema(ranks: list[RankRun]) -> None:
    found: Served = ranks[0].results[-1]
    assert isinstance(found, Served), found
    expected = answers(alone(small()), build_engine)
    assert found.tokens == expected.tokens
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    texts = [tokenizer.decode(found.tokens[i]) for i in range(len(cases()))]
    assert texts == [case.text for case in cases()]
    assert all(bytes(found.tokens[i][:1]) == b"{" for i in (10, 11))


def test_all_ranks_end_well(ranks: list[RankRun]) -> None:
    assert [rank.status for rank in ranks] == [0, 0], ranks[1].stderr
