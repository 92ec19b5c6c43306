"""What an engine has stored is listed by its model's id, and found good."""

from pathlib import Path

import pytest

from batching import check_caches, delete_cache, stored_caches
from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from tests.support.model_files import write_tiny
from tests.support.requests import make_request

# Of transformers, about the configs of tiny models.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_5"])
def test_blocks_windows_and_states_are_good(model_type: str, tmp_path: Path) -> None:
    model, folder = write_tiny(model_type, tmp_path / "model"), tmp_path / "store"
    config = EngineConfig(
        model=str(model),
        model_id="tiny",
        device="cpu",
        num_blocks=64,
        block_size=8,
        max_num_seqs=4,
        weights_cache_gib=0,
        kv_cache_dir=folder,
    )
    loaded = build_engine(config)
    loaded.engine.add(make_request(0, [i * 7 % 90 + 5 for i in range(50)], max_tokens=2))
    while loaded.engine.can_step:
        loaded.engine.step()
    (cache,) = stored_caches(folder)
    assert (cache.model, cache.is_loaded) == ("tiny", True)
    loaded.close()
    (cache,) = stored_caches(folder)
    checked = list(check_caches(folder))
    assert len(checked) == cache.num_entries
    assert {file.path.suffix for file in checked} > {".block"}
    assert not any(file.problem for file in checked)
    assert delete_cache(folder, cache.identity) == cache.num_bytes
