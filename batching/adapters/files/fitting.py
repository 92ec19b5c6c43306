"""Which layers of a model an adapter's layers are."""

from collections.abc import Iterable
from typing import Final

from batching.adapters.adapter import AdaptableLayers
from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.matrices import LayerSizes
from batching.adapters.low_rank import LowRank
from batching.errors import AdapterError, printable

# What stands before the numbered layers of a language model, with the names of other packages and within a model of
# images: towers of images have numbered layers, too.
_BEFORE_LAYERS: Final = {"model", "language_model", "text_model", "transformer", "decoder"}


def fit(file: AdapterFile, layers: AdaptableLayers) -> dict[str, str]:
    """Return by paths in the model which of the adapter's layers each of them is.

    Raises:
        AdapterError: one of them is none of the model's, is not served, or has other sizes; or the model has others
            than PEFT.
    """
    who = f"the adapter {printable(str(file.adapter))}"
    if file.is_of_peft and not layers.takes_peft:
        raise AdapterError(
            f"{who} does not fit the model: PEFT trained it beside weights that mlx-lm multiplies; one of mlx-lm would fit"
        )
    places = _Places([*layers.layers, *layers.refused])
    fitted: dict[str, str] = {}
    for name, sizes in file.layers.items():
        path = places.find(name)
        if path is None:
            reason = "is no layer of the model"
        elif path in fitted:
            reason = f"and {fitted[path]} are the same layer of the model"
        else:
            reason = _why_not(sizes, path, layers)
        if path is None or reason:
            raise AdapterError(f"{who} does not fit the model: {printable(name)} {reason}")
        fitted[path] = name
    return fitted


def fitted(file: AdapterFile, layers: AdaptableLayers) -> dict[str, LowRank]:
    """Return an adapter's numbers by paths in the model.

    Raises:
        AdapterChanged: the file has others than when it was opened.
        AdapterError: it does not fit, or cannot be read.
    """
    names, numbers = fit(file, layers), file.read()
    return {path: numbers[name] for path, name in names.items()}


def _why_not(sizes: LayerSizes, path: str, layers: AdaptableLayers) -> str:
    if path in layers.refused:
        return f"is not served: {layers.refused[path]}"
    layer = layers.layers[path]
    if sizes.inputs != layer.inputs:
        return f"has {sizes.inputs} inputs, the model's has {layer.inputs}"
    if sizes.outputs != layer.outputs:
        return f"has {sizes.outputs} outputs, the model's has {layer.outputs}"
    if sizes.rank > layers.max_rank:
        return f"has rank {sizes.rank}; the limit is {layers.max_rank}"
    return ""


class _Places:
    """The paths of a model's layers, found by the names that an adapter has for them."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._by_end: dict[str, list[str]] = {}
        for path in self._paths:
            if end := _from_layers(path):
                self._by_end.setdefault(end, []).append(path)

    def find(self, name: str) -> str | None:
        if name in self._paths:
            return name
        found = self._by_end.get(_from_layers(name), [])
        return found[0] if len(found) == 1 else None


def _from_layers(path: str) -> str:
    """Return the end of a language model's path, from its numbered layers on, as in `layers.0.mlp`; "" of others."""
    parts = path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    is_of_text = numbered > 0 and set(parts[: numbered - 1]) <= _BEFORE_LAYERS
    return ".".join(parts[numbered - 1 :]) if is_of_text else ""
