"""The sizes that an encoder's config declares."""

from collections.abc import Mapping
from typing import Any, Final

from batching.errors import ModelLoadError

# A hundred times what models have: building the layers of a hostile config would never end.
_MAX_LAYERS: Final = 10_000


class Sizes:
    """Reads a config.

    Raises:
        ModelLoadError: something is missing, or is no such value; the message names it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.hidden = self.count("hidden_size")
        self.num_heads = self.count("num_attention_heads")
        self.num_layers = self.count("num_hidden_layers")
        self.inner = self.count("intermediate_size")
        self.vocabulary = self.count("vocab_size")
        self.context = self.count("max_position_embeddings")
        if self.num_layers > _MAX_LAYERS:
            raise ModelLoadError(f"its config declares {self.num_layers} layers")
        if self.hidden % self.num_heads:
            raise ModelLoadError(
                f"its hidden_size {self.hidden} is no multiple of its {self.num_heads} heads"
            )

    def count(self, name: str, default: int | None = None) -> int:
        """Return a number that is at least 1."""
        value = self._config.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{name} in its config is {value!r}, and no number above 0")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number above 0; one that is not there, or null, is the default."""
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(f"{name} in its config is {value!r}, and no number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._config.get(name, default))

    def word(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        """Return what a word of the config stands for."""
        value = self._config.get(name, default)
        if value not in known:
            raise ModelLoadError(
                f"{name} in its config is {value!r}, which is not supported; {', '.join(known)} are"
            )
        return known[value]
