from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batching import build_ranked_engine, run_member
from batching.config import EngineConfig
from batching.engine.load_slices import ONE_SLICE
from batching.errors import ModelLoadError
from batching.ranks.unserved import check_served
from tests.support.rank_links import linked


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("kv_cache_dir", Path("folder"), "KV_CACHE_DIR"),
        ("kv_host_gib", 0.5, "KV_HOST_GIB"),
        ("max_adapters", 2, "MAX_ADAPTERS"),
        ("native", "require", "NATIVE"),
    ],
)
def test_settings_that_ranks_do_not_serve_are_named(setting: str, value: Any, name: str) -> None:
    config = EngineConfig(model="m", model_id="m", **{setting: value})
    with pytest.raises(ModelLoadError, match=f"^MLX_SERVER_{name} is not served over several"):
        check_served(config)
    check_served(EngineConfig(model="m", model_id="m"))


def test_no_rank_opens_a_model_with_such_a_setting() -> None:
    config = EngineConfig(model="m", model_id="m", max_adapters=1)
    with linked(2) as links, ThreadPoolExecutor(1) as threads:
        followed = threads.submit(run_member, config, links.members[0], "ring")
        with pytest.raises(ModelLoadError, match="MAX_ADAPTERS"):
            build_ranked_engine(config, links.leader, "ring", ONE_SLICE)
        with pytest.raises(ModelLoadError, match="MAX_ADAPTERS"):
            followed.result(30)
