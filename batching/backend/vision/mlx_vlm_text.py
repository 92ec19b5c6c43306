"""The text model of mlx-vlm, where mlx-lm has none of a type, called as mlx-lm's models are."""

from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.vision.axis_positions import AxisPositions
from batching.backend.vision.mlx_vlm_models import NoVisionModel, model_file
from batching.backend.vision.tower import whole_model
from batching.errors import ModelLoadError
from batching.model_files.vision import HOW_TO_SEE

Config = Mapping[str, Any]

_NUM_AXES: Final = 3
_PREFIX: Final = "language_model."


class _Arguments:
    """Stands for mlx-lm's arguments of a model: the config as it is."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def from_dict(cls, params: Config) -> "_Arguments":
        return cls(params)


class TextModel(nn.Module):
    """A text model, called with the positions of its rows in three axes, which it would count itself.

    language_model: mlx-vlm's; weights of whole models have this name, too.
    """

    def __init__(self, args: _Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._config = args.config
        self.model_type = str(args.config["model_type"])
        self.language_model = self._whole().language_model

    def _whole(self) -> Any:
        return whole_model(model_file(self.model_type), self._config)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        offset = cache[0].offset if cache else 0
        found = self.language_model(
            inputs, cache=cache, position_ids=_axes_of(offset, inputs.shape[1])
        )
        logits: mx.array = found.logits
        return logits

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of the text model by its own names."""
        named = self._whole().sanitize(weights)
        own = self.language_model.sanitize(named)
        return {name: array for name, array in own.items() if name.startswith(_PREFIX)}


def text_model_classes(config: Config) -> tuple[type, type]:
    """Return what mlx-lm's loader makes a model of.

    Raises:
        ModelLoadError: mlx-vlm is not installed, or has no such model.
    """
    try:
        model_file(str(config["model_type"]))
    except NoVisionModel as error:
        reason = f"mlx-lm has no {config['model_type']}, and {error}; {HOW_TO_SEE} adds it"
        raise ModelLoadError(f"cannot load the model: {reason}") from None
    return TextModel, _Arguments


def _axes_of(offset: Any, length: int) -> mx.array:
    """Return positions in time, height and width, int32 `[3, B, L]`.

    offset: the position of the first token of each row, `[B]`, or of the only one.
    """
    first = mx.array(offset.axes if isinstance(offset, AxisPositions) else offset, mx.int32)
    if first.ndim < 2:
        first = mx.broadcast_to(first.reshape(1, -1), (_NUM_AXES, first.size))
    return first[:, :, None] + mx.arange(length)
