"""The start-up banner of an engine: what was chosen, for the operator."""

from batching.adapters.adapter import NoAdapters
from batching.backend.builder.opening import OpenModel
from batching.backend.memory.device import MIB, device_memory, memory_in_use
from batching.backend.ranks.rank import ONLY_RANK, Rank
from batching.backend.vision.opening import OpenVision
from batching.backend.weights.storage import dtype_name
from batching.model_info.vision import NoVision
from batching.pooling import Embeddings, NoEmbeddings


def startup_lines(
    model_id: str, model: OpenModel, memory_limits: str, rank: Rank = ONLY_RANK
) -> tuple[str, ...]:
    """Return the lines for a model that is open; `memory_limits` is what `Platform.wire` has returned."""
    loaded, platform, limits = model.loaded, model.platform, model.sizes.limits
    dtype = platform.weights_dtype
    weights = "as stored" if dtype is None else dtype_name(dtype)
    lines = {
        "model": f"{model_id} ({loaded.model_type}, {loaded.source})",
        "ranks": ""
        if rank.group is None
        else f"{rank.group.size()}; no step is queued while another one runs",
        "device": platform.device_line(weights),
        "weights": loaded.storage,
        "kernels": platform.kernels_line(model.prepared.note),
        "packed": model.prepared.source,
        "context": f"{limits.max_request_tokens} tokens a request",
        "kv cache": model.sizes.pool_line,
        "vectors": _embeddings_line(model.embeddings),
        "images": _images_line(model.vision),
        "adapters": _adapters_line(model),
        "batch": f"up to {limits.max_num_seqs} requests, {limits.max_num_batched_tokens} tokens a step",
        "memory": _memory_line(memory_limits),
    }
    return tuple(f"{name:<10}{line}" for name, line in lines.items() if line)


def _embeddings_line(embeddings: Embeddings | NoEmbeddings) -> str:
    if isinstance(embeddings, NoEmbeddings):
        return ""
    return f"of {embeddings.size} numbers, pooling: {embeddings.pooling}"


def _images_line(vision: OpenVision | NoVision) -> str:
    if isinstance(vision, NoVision):
        return ""
    return f"by the tower of mlx-vlm's {vision.model.model_type} ({vision.num_bytes // MIB} MiB)"


def _adapters_line(model: OpenModel) -> str:
    if isinstance(model.adapters, NoAdapters):
        return ""
    layers = model.adapters.model.layers
    most = f"up to {model.sizes.limits.max_adapters} of rank {layers.max_rank}"
    return f"{most} on {len(layers.layers)} layers ({model.adapters.num_bytes // MIB} MiB)"


def _memory_line(limits: str) -> str:
    line = f"{memory_in_use() // MIB} MiB in use"
    return f"{line} of {device_memory() // MIB} MiB; {limits}" if limits else line
