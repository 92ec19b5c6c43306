"""Changes to a model, and to the Python modules of its classes while it runs, which are undone in the end.

Modules that a platform replaces by its own are no changes in this sense: their weights are gone.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final, Self

import mlx.nn as nn

Functions = dict["_Rebound", Callable[..., Any]]
# The attribute of a model's class that holds the functions which stand for others while it runs.
_FUNCTIONS: Final = "_rebound_functions"


class Changes:
    """A list of changes to a model, to be undone before another way of serving it, or when it is closed."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def undo(self) -> bool:
        """Undo all changes, the last one first; return whether there were any."""
        undo, self._undo = self._undo, []
        # One that raises does not keep the others from being undone.
        with ExitStack() as stack:
            for each in undo:
                stack.callback(each)
        return bool(undo)

    def take(self, others: "Changes") -> None:
        """Undo these changes, too, from now on."""
        self._undo += others._undo
        others._undo = []

    def override_call(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Change the class of a module to a subclass of the same name with this `__call__`."""
        self._derive(module, {"__call__": call})

    def rebind(
        self, model: nn.Module, owner: ModuleType, name: str, function: Callable[..., Any]
    ) -> None:
        """Let the code of a Python module call another function while this model runs, in any thread.

        Other models, whose classes come from the same Python module, are not affected.  A model runs while it
        is called, and within `running`.
        """
        functions = self._functions(model)
        rebound = _Rebound.shared(owner, name)
        before = functions.get(rebound)
        functions[rebound] = function

        def undo() -> None:
            if before is None:
                del functions[rebound]
            else:
                functions[rebound] = before
            rebound.leave()

        self._undo.append(undo)

    def rebind_within(
        self, model: nn.Module, owner: ModuleType, library: str, **functions: Callable[..., Any]
    ) -> None:
        """Let the code of a Python module call other functions of a library that it has imported as a name.

        The library itself stays as it is: what the name stands for becomes a copy of it.
        """
        copied = _Copied.shared(owner, library)
        self._undo.append(copied.leave)
        for name, function in functions.items():
            self.rebind(model, copied.value, name, function)

    def _functions(self, model: nn.Module) -> Functions:
        """Return the functions of a model; they are its own from the first time on."""
        known: Functions | None = getattr(type(model), _FUNCTIONS, None)
        if known is not None:
            return known
        model_class = type(model)
        functions: Functions = {}

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with _entered(functions):
                return model_class.__call__(self, *args, **kwargs)

        self._derive(model, {"__call__": call, _FUNCTIONS: functions})
        return functions

    def _derive(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        base = type(module)
        self.set_attribute(module, "__class__", type(base.__name__, (base,), attributes))


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Run modules of a model by themselves as they run when it is called."""
    with _entered(getattr(type(model), _FUNCTIONS, {})):
        yield


@contextmanager
def suspended() -> Iterator[None]:
    """Within a call of one model, let others run as they are."""
    with _entered({}):
        yield


def original(owner: ModuleType, name: str) -> Any:
    """Return what a name of a Python module stands for if no model changes that; None without such a name."""
    with _lock:
        shared = _shared.get((id(owner), name))
        return shared.original if shared else vars(owner).get(name)


def unchanged_class(module: nn.Module) -> type:
    """Return the class of a module without what `override_call` has made of it."""
    return next(each for each in type(module).__mro__ if each.__module__ != __name__)


def python_modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules that define the model's classes and their base classes, without our own."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    return [sys.modules[name] for name in names if name in sys.modules and not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == __name__.partition(".")[0]


class _Running(threading.local):
    """The functions of the model that runs in this thread."""

    def __init__(self) -> None:
        self.functions: Functions = {}


class _Replacement:
    """Something that takes the place of a name of a Python module, as long as a model needs it.

    original: what the name stood for.
    """

    def __init__(self, owner: ModuleType, name: str) -> None:
        self.original: Any = vars(owner)[name]
        self._owner, self._name = owner, name
        self._num_users = 0

    @property
    def value(self) -> Any:
        return self

    @classmethod
    def shared(cls, owner: ModuleType, name: str) -> Self:
        """Return the replacement of a name for one more user."""
        with _lock:
            found = _shared.get((id(owner), name))
            if found is None:
                found = _shared[id(owner), name] = cls(owner, name)
                vars(owner)[name] = found.value
            assert isinstance(found, cls), "a name is replaced in one way"
            found._num_users += 1
            return found

    def leave(self) -> None:
        """Count a user less; the last one leaves the name as it was."""
        with _lock:
            self._num_users -= 1
            if not self._num_users:
                del _shared[id(self._owner), self._name]
                vars(self._owner)[self._name] = self.original


class _Rebound(_Replacement):
    """A function that is another one while some models run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _running.functions.get(self, self.original)(*args, **kwargs)


class _Copied(_Replacement):
    """A copy of an imported library, in which functions are rebound for one Python module."""

    def __init__(self, owner: ModuleType, name: str) -> None:
        super().__init__(owner, name)
        self._copy = ModuleType(self.original.__name__, self.original.__doc__)
        vars(self._copy).update(vars(self.original))

    @property
    def value(self) -> ModuleType:
        return self._copy


_running: Final = _Running()
_shared: Final[dict[tuple[int, str], _Replacement]] = {}
_lock: Final = threading.Lock()


@contextmanager
def _entered(functions: Functions) -> Iterator[None]:
    before, _running.functions = _running.functions, functions
    try:
        yield
    finally:
        _running.functions = before
