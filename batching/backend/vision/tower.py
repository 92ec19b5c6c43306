"""The vision tower of a model: mlx-vlm's tower and projector, without its text model."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from batching.backend.former_config import former_values
from batching.backend.hooks.changes import Changes
from batching.backend.vision.axis_positions import Axes, pair_axes_of
from batching.backend.vision.mlx_vlm_models import model_file
from batching.backend.vision.pieces import Pieces, TowerLayers
from batching.errors import ModelLoadError
from batching.inputs.images import ImageInput

Config = Mapping[str, Any]

_PARTS: Final = ("text", "vision", "projector", "perceiver")
_TEXT_MODEL: Final = "language_model"
# Tokens of a text, whose embeddings tell by how much the model scales those of its table.
_TEXT: Final = (1, 2, 3)


class UnfitTower(Exception):
    """mlx-vlm's model does not take the config, or the directory has no weights of a tower; the message says which."""


class EncodedImage(NamedTuple):
    """What a tower makes of an image.

    embeddings: a row for each of the image's rows, as the text model's table has them, `[K, hidden_size]`.
    added: what is added to these rows behind the first layers, `[K, hidden_size]` for each of them.
    """

    embeddings: mx.array
    added: tuple[mx.array, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.embeddings, *self.added]


class Tower:
    """Encodes images one by one, as the whole model would in a prompt that has nothing else.

    pair_axes: which axis turns each pair of a rotation; None if rows have one position.
    """

    def __init__(self, model: nn.Module, config: Config, changes: Changes) -> None:
        self._model = model
        self.pair_axes = _pair_axes(config)
        self.hidden_size = int(model.config.text_config.hidden_size)
        _remove_text_model(model)
        self._layers = TowerLayers(model, changes)

    def encode(self, image: ImageInput) -> tuple[EncodedImage, Pieces]:
        """Return the rows of an image, not evaluated yet, and the pieces in which they are."""
        with self._layers.recording() as outputs:
            encoded = self._encode(image)
        return encoded, Pieces(outputs, encoded.arrays)

    @property
    def num_pieces(self) -> int:
        """In how many pieces of about the same work an image can be encoded."""
        return max(1, len(self._layers))

    def positions(self, image: ImageInput) -> Axes:
        """Return the positions of an image's tokens in three axes from its beginning on, `[3, L]`."""
        ids = mx.array([image.token_ids], mx.int32)
        grid = _inputs(image).get("image_grid_thw")
        found, _ = self._model[_TEXT_MODEL].get_rope_index(ids, grid)
        return np.array(found[:, 0], np.int32)

    @property
    def num_added(self) -> int:
        """Behind how many layers rows are added."""
        config = getattr(self._model.config, "vision_config", None)
        return len(getattr(config, "deepstack_visual_indexes", None) or ())

    @property
    def weights(self) -> list[mx.array]:
        return [*_flat(self._model).values()]

    def _encode(self, image: ImageInput) -> EncodedImage:
        ids = mx.array([image.token_ids], mx.int32)
        found = self._model.get_input_embeddings(ids, mask=mx.ones_like(ids), **_inputs(image))
        rows = mx.array(image.rows)
        deepstack = getattr(found, "deepstack_visual_embeds", None)
        added = () if deepstack is None else tuple(deepstack[i] for i in range(len(deepstack)))
        if any(len(each) != image.num_rows for each in added):
            raise ValueError(f"the tower has made {len(added[0])} rows, not {image.num_rows}")
        return EncodedImage(found.inputs_embeds[0][rows] / self._scale, added)

    @cached_property
    def _scale(self) -> float:
        """By how much the model scales what its table returns, here ones."""
        found = self._model.get_input_embeddings(mx.array([_TEXT], mx.int32), pixel_values=None)
        return float(found.inputs_embeds[0, 0, 0])


def load_tower(path: Path, config: Config, dtype: mx.Dtype | None, changes: Changes) -> Tower:
    """Load the tower of a model directory; its weights are read when they are evaluated.

    dtype: to which they are converted; None keeps them as they are stored.
    changes: what is changed in Python modules is undone with them.

    Raises:
        NoVisionModel: mlx-vlm is not installed, or has no such model.
        UnfitTower: that model does not take the config, or there are no weights.
        ModelLoadError: weights are missing.
    """
    module = model_file(str(config["model_type"]))
    try:
        model = whole_model(module, config)
    except (TypeError, ValueError) as error:
        raise UnfitTower(
            f"mlx-vlm's {config['model_type']} does not take its config ({error})"
        ) from error
    weights = _tower_weights(path, module, model)
    if dtype is not None:
        weights = {name: _converted(array, dtype) for name, array in weights.items()}
    tower = Tower(model, config, changes)
    _quantize(model, config, weights)
    expected = _flat(model).keys()
    if not expected & weights.keys():
        raise UnfitTower("its files have no weights of a vision tower")
    if missing := sorted(expected - weights.keys()):
        raise ModelLoadError(
            f"cannot load {path}: its vision tower lacks {len(missing)} tensors, as {missing[0]}"
        )
    model.load_weights([(name, weights[name]) for name in sorted(expected)])
    model.eval()
    return tower


def _flat(model: nn.Module) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    tree_flatten(model.parameters(), destination=arrays)
    return arrays


def whole_model(module: Any, config: Config) -> nn.Module:
    """Make mlx-vlm's model of a config, without weights."""
    model: nn.Module = module.Model(_model_config(module, config))
    return model


class _OnesTable(nn.Module):
    """Stands for a table of embeddings, of which a tower needs no row."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = table.weight.shape[1]

    def __call__(self, ids: mx.array) -> mx.array:
        return mx.ones((*ids.shape, self._size))


def _remove_text_model(model: nn.Module) -> None:
    """Keep of the text model what computes positions."""
    text = model[_TEXT_MODEL]
    for owner in text.modules():
        for name, child in list(owner.items()):
            if isinstance(child, nn.Embedding):
                owner[name] = _OnesTable(child)
            elif isinstance(child, nn.Module) and not child.get("layers") and name != "model":
                del owner[name]
        if "layers" in owner:
            owner["layers"] = []
    for name in [name for name, value in text.items() if isinstance(value, mx.array)]:
        del text[name]


def _inputs(image: ImageInput) -> dict[str, mx.array]:
    arrays = image.arrays
    return {
        name: mx.array(np.frombuffer(data, dtype).reshape(shape))
        for name, dtype, shape, data in arrays
    }


def _pair_axes(config: Config) -> npt.NDArray[np.int64] | None:
    text = config.get("text_config") or config
    for owner in (text, config):
        for name in ("rope_parameters", "rope_scaling"):
            rope = owner.get(name)
            if isinstance(rope, Mapping) and (section := rope.get("mrope_section")):
                # Qwen3-VL's model always interleaves them; what says so in its config is not always there.
                interleaved = rope.get("mrope_interleaved", "qwen3" in str(config["model_type"]))
                return pair_axes_of(section, is_interleaved=bool(interleaved))
    return None


def _model_config(module: Any, config: Config) -> Any:
    # Older files have the text model's values outside of `text_config`; mlx-vlm puts them there.
    config = {**config, **former_values(config)}
    changed = deepcopy(dict(config))
    made = module.ModelConfig.from_dict(changed)
    for part in _PARTS:
        name = f"{part}_config"
        if hasattr(made, name) and (values := config.get(name) or changed.get(name)):
            kind = getattr(module, f"{part.title()}Config")
            values = _with_known_type(deepcopy(values), kind, str(config["model_type"]))
            setattr(made, name, kind.from_dict(values))
    return made


def _with_known_type(values: dict[str, Any], kind: Any, model_type: str) -> dict[str, Any]:
    """Transformers 5 has names for the vision parts of some types, where mlx-vlm knows that of the whole."""
    is_named = values.get("model_type") == f"{model_type}_vision"
    if is_named and getattr(kind, "model_type", None) == model_type:
        values["model_type"] = model_type
    return values


def _tower_weights(path: Path, module: Any, model: Any) -> dict[str, mx.array]:
    """Return the weights of a directory by the names of mlx-vlm's model, without those of the text model."""
    weights: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        weights.update(cast("dict[str, mx.array]", mx.load(str(file))))
    for owner in (model, _part(module, "VisionModel", model.config.vision_config)):
        if hasattr(owner, "sanitize"):
            weights = owner.sanitize(weights)
    return {k: v for k, v in weights.items() if not k.startswith(f"{_TEXT_MODEL}.")}


def _part(module: Any, name: str, config: Any) -> Any:
    return getattr(module, name)(config) if hasattr(module, name) else None


def _quantize(model: nn.Module, config: Config, weights: Mapping[str, mx.array]) -> None:
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, Mapping) or "bits" not in quantization:
        return

    def of_module(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return quantization.get(path, True)

    nn.quantize(
        model,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=of_module,
    )


def _converted(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
