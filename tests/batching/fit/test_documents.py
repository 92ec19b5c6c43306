"""The table of docs/models.md and the one of README.md are what is computed."""

import re
from pathlib import Path
from typing import Final

from batching.config import EngineConfig
from batching.fit.estimate import estimate
from batching.fit.weights import Compute
from batching.model_files.description import outline

ROOT: Final = Path(__file__).parents[3]
CONFIG: Final = EngineConfig(model="m", model_id="m")
GIB: Final = 1 << 30
# Model, layers, KV heads, head size, weights, KV of a token, and the pool.
ROW: Final = re.compile(
    r"^\| `([\w.-]+)`.* \| (\d+) x (\d+) x (\d+) \| ([\d.]+) GiB \| (\d+) KiB \| ([\d.]+) GiB \|", re.MULTILINE
)  # fmt: skip


def test_the_table_of_models_is_what_is_computed() -> None:
    rows = ROW.findall((ROOT / "docs/models.md").read_text(encoding="utf-8"))
    assert len(rows) >= 7
    for name, layers, heads, size, weights, token, pool in rows:
        config = {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "num_hidden_layers": int(layers),
            "num_attention_heads": 32,
            "num_key_value_heads": int(heads),
            "head_dim": int(size),
            "max_position_embeddings": 32_768,
            "quantization": {"bits": 4, "group_size": 64},
        }
        num_bytes = int(float(weights) * GIB)
        needs = estimate(outline(config, num_bytes, num_bytes), CONFIG, Compute.STORED)
        assert needs.kv_bytes_per_token == int(token) * 1024, name
        assert needs.wanted_pool is not None
        assert f"{needs.wanted_pool / GIB:.1f}" == pool, name
        assert f"{needs.weights / GIB:.1f}" == weights, name
