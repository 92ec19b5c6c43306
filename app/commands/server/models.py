"""The models of a server as `GET /v1/models` lists them; an older server leaves fields out."""

from collections.abc import Iterable
from typing import Any

from app.commands.errors import RequestFailed

# An object of JSON.
Model = dict[str, Any]


def find_model(models: Iterable[Model], name: str) -> Model:
    """Return the model with an id or another name.

    Raises:
        RequestFailed: there is none.
    """
    for model in models:
        if name == model["id"] or name in model.get("aliases", ()):
            return model
    known = ", ".join(model["id"] for model in models)
    raise RequestFailed(f"the server has no model {name}; it has {known or 'none'}")


def choose_model(models: Iterable[Model], name: str | None) -> Model:
    """Return the model with a name; without one the first that chats, a loaded one before others.

    Raises:
        RequestFailed: there is none.
    """
    if name:
        return find_model(models, name)
    chatting = [m for m in models if "completion" in m.get("capabilities", ("completion",))]
    if not chatting:
        raise RequestFailed("the server has no model that chats")
    return min(chatting, key=lambda model: state_of(model) not in ("", "loaded"))


def takes_images(model: Model) -> bool:
    """Return whether the server says that a model takes images."""
    architecture = model.get("architecture") or {}
    return "image" in architecture.get("input_modalities", ())


def state_of(model: Model) -> str:
    """Return the state of a model, such as `loaded`; an older server says none, which is empty."""
    return str(_status(model).get("value", ""))


def failure_of(model: Model) -> str:
    """Return why a model failed to load, or nothing."""
    status = _status(model)
    return str(status.get("reason") or "the load failed") if status.get("failed") else ""


def progress_of(model: Model) -> str:
    """Return how far a model has loaded, ` 42 %`, or nothing."""
    progress = _status(model).get("progress")
    return "" if progress is None else f" {100 * progress:.0f} %"


def _status(model: Model) -> dict[str, Any]:
    status = model.get("status")
    return status if isinstance(status, dict) else {}
