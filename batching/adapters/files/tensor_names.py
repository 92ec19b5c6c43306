"""What the names of an adapter's tensors say: which layer each belongs to, or why it is not served."""

import re
from typing import Final, NamedTuple

_MAX_LENGTH: Final = 200
MLX_LM: Final = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[ab])")
# Some versions write the adapter's name, too.
PEFT: Final = re.compile(
    r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])(\.[^.]+)?\.weight"
)

# Of layers that no adapter is served for.
_LAYERS: Final = {
    "experts": r"(experts|switch_mlp|switch_glu)",
    "embeddings": r"(embed_tokens|embed_positions|word_embeddings|tok_embeddings|embed_in|wte|wpe)",
    "the output head": r"(lm_head|embed_out|output_layer)",
}
_OTHERS: Final = {
    "DoRA is": r"\.lora_magnitude_vector\b|\.m$",
    "adapters of embeddings are": r"\.lora_embedding_[AB]\b",
    "modules_to_save are": r"\.(modules_to_save|original_module)\.",
    "biases are": r"\.(bias|lora_bias)$",
    "full fine-tunes are": r"\.(weight|scales|biases)$",
}


class Part(NamedTuple):
    """A matrix of a layer.

    layer: its path in the model that the adapter was made for.
    matrix: "a" or "b".
    """

    layer: str
    matrix: str


def part_of(name: str, pattern: re.Pattern[str]) -> Part:
    """Return what a tensor is, by its name in files of a format.

    Raises:
        ValueError: what it is, is not served, or not known; the text follows the file's name.
    """
    if len(name) > _MAX_LENGTH:
        raise ValueError(f"has a name of {len(name)} characters; the limit is {_MAX_LENGTH}")
    for what, layers in _LAYERS.items():
        if re.search(rf"(^|\.){layers}\.", name):
            raise ValueError(f"has {name}: adapters of {what} are not served")
    if match := pattern.fullmatch(name):
        return Part(match["layer"], match["matrix"].lower())
    for what, others in _OTHERS.items():
        if re.search(others, name):
            raise ValueError(f"has {name}: {what} not served")
    raise ValueError(f"has {name}, which is not known")
