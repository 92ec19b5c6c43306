"""Changes to a model and to its Python modules that can be undone."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn


class Changes:
    """A list of changes to a model, to be undone before another way of serving it is tried."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def undo(self) -> bool:
        """Undo all changes; return whether there were any."""
        has_changed = bool(self._undo)
        while self._undo:
            self._undo.pop()()
        return has_changed

    def override_call(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Change the class of a module to a subclass of the same name with this `__call__`."""
        plain = type(module)
        self.set_attribute(module, "__class__", type(plain.__name__, (plain,), {"__call__": call}))


def python_modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the model's classes and their base classes."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    return [sys.modules[name] for name in {c.__module__ for c in classes} if name in sys.modules]
