"""Settings that one model over several processes is not served with."""

from batching.config import EngineConfig
from batching.errors import ModelLoadError


def check_served(config: EngineConfig) -> None:
    """Check that nothing is set that several ranks cannot do.

    Raises:
        ModelLoadError: something is; it names the setting.
    """
    reasons = {
        "KV_CACHE_DIR": (config.kv_cache_dir is not None, "each has a part of the keys and values"),
        "KV_HOST_GIB": (config.kv_host_gib > 0, "each has a part of the keys and values"),
        "MAX_ADAPTERS": (config.max_adapters > 0, "adapters are not divided"),
        "NATIVE": (config.native == "require", "the native kernels add up no parts"),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise ModelLoadError(f"MLX_SERVER_{name} is not served over several ranks: {reason}")
