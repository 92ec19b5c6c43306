"""Changes to a model, and to the modules that its classes come from, that can be taken back."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn


class Changes:
    """What was changed, so that another way can be tried on the model as it was."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def undo(self) -> bool:
        """Take everything back; return whether there was anything."""
        has_changed = bool(self._undo)
        while self._undo:
            self._undo.pop()()
        return has_changed

    def override_call(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Make a module an instance of a subclass of its class, of the same name."""
        plain = type(module)
        self.set_attribute(module, "__class__", type(plain.__name__, (plain,), {"__call__": call}))


def python_modules(model: nn.Module) -> list[ModuleType]:
    """Return the modules that a model's classes come from, those of their base classes included."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    return [sys.modules[name] for name in {c.__module__ for c in classes} if name in sys.modules]
