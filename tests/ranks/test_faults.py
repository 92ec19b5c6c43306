"""What goes wrong in one rank ends all of them, in one line and at once."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from batching.config import EngineConfig
from tests.support import rank_faults
from tests.support.model_files import write_model, write_tiny
from tests.support.rank_scenarios import everything, load
from tests.support.ranks import Job, RankRun, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return config_of(write_tiny("llama", tmp_path_factory.mktemp("llama")))


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), model_id="tiny", device="cpu", num_blocks=20, block_size=8)


def test_models_that_cannot_be_served_are_rejected_by_all_ranks(
    llama: EngineConfig, tmp_path: Path
) -> None:
    undivided = config_of(write_tiny("gemma3_text", tmp_path / "gemma3"))
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    odd = config_of(write_model(tmp_path / "odd", **heads))
    quantized = config_of(write_model(tmp_path / "quantized", intermediate_size=128))
    missing = replace(llama, model=str(tmp_path / "nothing"))
    jobs = [
        Job(load, undivided),
        Job(load, odd),
        Job(load, llama, at_rank={1: missing}),
        Job(load, llama, faults={1: rank_faults.large_sums_are_wrong}),
        Job(load, replace(llama, max_adapters=1)),
        Job(load, llama, at_rank={1: replace(llama, num_blocks=16)}),
        # As a machine does that has a GPU, in a model of other than float32.
        Job(load, quantized, faults={1: rank_faults.weights_as_stored}),
    ]
    ranks = run_ranks(tmp_path, jobs)
    assert [rank.status for rank in ranks] == [0, 0], ranks[1].stderr
    first, second = (rank.results for rank in ranks)
    assert "mlx-lm does not divide models of the type gemma3_text" in first[0]
    assert "cannot be divided among 2 ranks: n_kv_heads is 3" in first[1]
    assert re.search(r"rank 1: there is no file or directory .*nothing", first[2])
    assert re.search(r"a prompt in chunks of \d+ tokens has other logits", first[3])
    assert "MLX_SERVER_MAX_ADAPTERS is not served over several ranks" in first[4]
    assert any("16 blocks of 8 tokens" in line for line in first[5])
    assert all(text.startswith("ModelLoadError") for text in (*first[:5], *second[:5]))
    assert second[5] is None
    assert "rank 1 has the numerics (mlx, no kernels, weights auto," in first[6]
    assert first[6] == second[6]


@pytest.fixture
def failed(llama: EngineConfig, tmp_path: Path, request: pytest.FixtureRequest) -> list[RankRun]:
    rank, fault = request.param
    return run_ranks(tmp_path, [Job(everything, llama, faults={rank: fault})])


@pytest.mark.parametrize("failed", [(1, rank_faults.member_fails)], indirect=True)
def test_a_rank_that_fails_in_a_step_ends_the_engine(failed: list[RankRun]) -> None:
    (found,) = failed[0].results
    assert found.startswith("RankLost: rank 1 ")
    assert failed[1].status == 1
    assert "a planted fault" in failed[1].stderr


@pytest.mark.parametrize("failed", [(0, rank_faults.leader_fails)], indirect=True)
def test_a_first_rank_that_fails_in_a_step_ends_the_engine_and_the_others(
    failed: list[RankRun],
) -> None:
    (found,) = failed[0].results
    assert "rank 0 cannot compute a step with the others: RuntimeError: a planted fault" in found
    assert failed[1].status == 1
