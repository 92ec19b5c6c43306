"""What is known of a model before it is loaded, in one JSON object."""

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from app.store.found import FoundModel
from batching import (
    EngineConfig,
    Machine,
    MemoryEstimate,
    ModelDescription,
    ModelLoadError,
    VisionModel,
    describe,
    estimate,
    served_as,
)

Facts = dict[str, Any]  # a JSON object
_UNKNOWN_TYPE: Final = "not at all: mlx-lm has no such type"
_NO_TYPE: Final = "not known before it is loaded"


class Fit(NamedTuple):
    """Where models are to fit: a machine, and how an engine is configured there."""

    machine: Machine
    config: EngineConfig

    def of(self, model: ModelDescription) -> MemoryEstimate:
        return estimate(model, self.config, self.machine.compute)


def facts_of(found: FoundModel, fit: Fit) -> Facts:
    """Return what is known of a model on this machine; `problem` says why it is not more."""
    facts: Facts = {
        "name": found.name,
        "place": found.place.value,
        "path": str(found.path),
        "size": found.size,
        "modified": datetime.fromtimestamp(found.modified, UTC).isoformat(timespec="seconds"),
        "problem": found.problem or None,
    }
    if found.problem:
        return facts | of_description(ModelDescription(None, {}, (), 0), None)
    try:
        described = describe(found.path)
    except ModelLoadError as error:
        described, facts["problem"] = ModelDescription(None, {}, (), 0), str(error)
    return facts | of_description(described, None if facts["problem"] else fit)


def of_description(model: ModelDescription, fit: Fit | None) -> Facts:
    """Return what a description says; without `fit` nothing is known of the memory."""
    needs = None if fit is None else fit.of(model)
    return {
        "model_type": model.model_type,
        "quantization": model.quantization or None,
        "context": model.context,
        "layers": model.num_layers,
        "kv_bytes_per_token": needs and needs.kv_bytes_per_token,
        "chat_template": model.chat_template is not None,
        "tools": model.has_tools,
        "served": _served(model),
        "vision": None if model.model_type is None else isinstance(model.vision, VisionModel),
        "no_vision": _no_vision(model),
        "needs": needs and needs.least,
        "needs_is_complete": needs is not None and needs.is_complete,
        "missing": fit and needs and fit.machine.missing(needs.least),
        "fits": None if fit is None or needs is None else not fit.machine.missing(needs.least),
    }


def _served(model: ModelDescription) -> str:
    if model.model_type is None:
        return _NO_TYPE
    return served_as(model.model_type, model.text_type) or _UNKNOWN_TYPE


def _no_vision(model: ModelDescription) -> str | None:
    """Return why a model takes no images; None if it takes some, or is not known."""
    if model.model_type is None or isinstance(model.vision, VisionModel):
        return None
    return model.vision.reason
