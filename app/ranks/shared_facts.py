"""What all ranks must have in common, besides the model's files."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Final

from app import PROGRAM, __version__
from app.ranks.plan import RankPlan
from app.settings import Settings, env_name
from batching import EngineConfig

# Compared when each rank has the files.
MODEL_FACT: Final = "a model with the digest"
# Each machine may have its own; of the model the files count, wherever they are.
_OWN: Final = {
    "model",
    "model_id",
    "memory_budget",
    "max_memory_gib",
    "cpu_threads",
    "weights_cache_dir",
    "weights_cache_gib",
    "mlx_cache_mib",
    "wired_limit_mib",
}
_PACKAGES: Final = {"MLX": "mlx", "mlx-lm": "mlx-lm"}


def shared_facts(config: EngineConfig, plan: RankPlan) -> Mapping[str, object]:
    """Return facts by the names that the operator reads, the most important first."""
    settings = {
        env_name(field.name) if field.name in Settings.model_fields else field.name: getattr(
            config, field.name
        )
        for field in fields(EngineConfig)
        if field.name not in _OWN
    }
    return {
        PROGRAM: __version__,
        **{name: version(package) for name, package in _PACKAGES.items()},
        "Python": "{}.{}".format(*sys.version_info[:2]),
        env_name("ranks_backend"): plan.backend,
        **settings,
    }
