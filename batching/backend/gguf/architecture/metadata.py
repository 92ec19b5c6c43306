"""The values of a GGUF file that describe its model, which stand under the architecture's name."""

from dataclasses import dataclass
from typing import Any

from batching.model_files.gguf_header import GgufHeader

Config = dict[str, Any]  # config.json's contents: mlx-lm takes any JSON


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Reads `gemma3.block_count` as `block_count`, and what several architectures derive alike."""

    header: GgufHeader
    family: str

    def has(self, key: str) -> bool:
        return f"{self.family}.{key}" in self.header.metadata

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; a value for each layer counts as one if all are the same."""
        name = f"{self.family}.{key}"
        if len(same := set(self.header.numbers(name))) == 1:
            return same.pop()
        return self.header.number(name, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def numbers(self, key: str) -> list[float]:
        return self.header.numbers(f"{self.family}.{key}")

    def text(self, key: str, default: str) -> str:
        return self.header.text(f"{self.family}.{key}", default) or default

    def has_tensor(self, part: str) -> bool:
        """Tell whether any layer has a tensor of this name."""
        return any(name.endswith(f".{part}") for name in self.header.tensors)

    @property
    def num_layers(self) -> int:
        """Return the layers of the model itself, without those that predict further tokens."""
        count = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        if not 0 < count <= (num_tensors := len(self.header.tensors)):
            raise self.header.refuse(f"it has {num_tensors} tensors for {count} layers")
        return count

    @property
    def num_heads(self) -> int:
        if (count := self.integer("attention.head_count")) < 1:
            raise self.header.refuse(f"it has {count} attention heads")
        return count

    @property
    def num_kv_heads(self) -> int:
        """Return the KV heads of a layer that has any."""
        counts = self.numbers("attention.head_count_kv")
        return (
            int(max(counts)) if counts else self.integer("attention.head_count_kv", self.num_heads)
        )

    @property
    def head_dim(self) -> int:
        usual = self.integer("embedding_length") // self.num_heads
        if (size := self.integer("attention.key_length", usual)) < 1:
            raise self.header.refuse(f"its heads have a size of {size}")
        return size

    @property
    def rotated_share(self) -> float:
        """Return what part of a head has a rotary embedding."""
        return self.integer("rope.dimension_count", self.head_dim) / self.head_dim

    @property
    def full_attention_layers(self) -> list[int]:
        """Return the layers that have KV heads."""
        counts = self.numbers("attention.head_count_kv")
        return [index for index, count in enumerate(counts) if count]

    @property
    def latent_head_dim(self) -> int:
        """Return the size of a key before it is made a part of a latent."""
        return self.integer("attention.key_length_mla", self.integer("attention.key_length", 0))

    @property
    def latent_value_dim(self) -> int:
        return self.integer("attention.value_length_mla", self.integer("attention.value_length", 0))
