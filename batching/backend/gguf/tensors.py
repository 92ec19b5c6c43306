"""The tensors of a GGUF file's model, and mlx-lm's names of them."""

from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from batching.backend.gguf.architecture.known import Architecture
from batching.backend.gguf.architecture.metadata import Config
from batching.model_files.gguf_header import GgufHeader

T = TypeVar("T")

ROPE_FACTORS: Final = "rope_freqs.weight"
# Read into the config, or not needed: the model has no layers beyond its own.
NOT_WEIGHTS: Final = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
_NAMES: Final = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embedding_norm",
    "output_norm": "norm",
    "output": "lm_head",
}


def own_tensors(header: GgufHeader, config: Config) -> Iterator[str]:
    """Yield the names of the model's tensors, not those of layers that predict further tokens."""
    for name in header.tensors:
        match name.split("."):
            case ["blk", layer, *_] if layer.isdecimal():
                is_own = int(layer) < config["num_hidden_layers"]
            case _:
                is_own = name not in NOT_WEIGHTS
        if is_own:
            yield name


def rename(header: GgufHeader, architecture: Architecture, name: str) -> str:
    """Return mlx-lm's name of a tensor: `blk.0.attn_q.weight` is q_proj's of layer 0."""
    part = part_of(name)
    found = look_up(_NAMES if part == name else architecture.names, part)
    if found is None:
        raise header.refuse(f"unknown tensor {name}")
    layer = "" if part == name else f"layers.{name.split('.')[1]}."
    renamed = "".join(found)
    # Tensors outside of layers belong to the inner model, except the head.
    inner = "" if renamed.startswith("lm_head") else "model."
    return f"{architecture.prefix}{inner}{layer}{renamed}"


def part_of(name: str) -> str:
    """Return the name inside its layer, if it has one."""
    match name.split(".", 2):
        case ["blk", _, part]:
            return part
    return name


def look_up(table: Mapping[str, T], part: str) -> tuple[T, str] | None:
    """Find a name as it stands, or without `.weight` or `.bias`, and return that, too."""
    if part in table:
        return table[part], ""
    stem, dot, kind = part.rpartition(".")
    return (table[stem], dot + kind) if stem in table else None


def layer_of(name: str) -> str:
    """Return the number of a tensor's layer, empty if it is in none."""
    return "" if part_of(name) == name else name.split(".")[1]
