"""The adapters that requests can name."""

import re
from collections.abc import Container, Iterable
from threading import Lock
from typing import Final, NamedTuple, Protocol

from batching.adapters.adapter import Adapter, NoAdapters
from batching.errors import AdapterError, printable
from batching.model_info import ModelInfo

MAX_ADAPTERS: Final = 1000
# Without a colon, which is between a model and its adapter.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")


class AdapterFile(Protocol):
    @property
    def adapter(self) -> Adapter: ...


class ServedAdapter(NamedTuple):
    """base: the id of its model."""

    name: str
    base: str
    file: AdapterFile


def check_adapter_name(name: str) -> None:
    """Raise AdapterError for a name that no adapter can have."""
    if not _NAME.fullmatch(name):
        raise AdapterError(
            f"an adapter cannot be named '{printable(name)}': names have at most 128 letters, digits and ._/@+-, "
            "of which the first is a letter or a digit"
        )


def check_fit(adapter: AdapterFile, model: ModelInfo) -> None:
    if isinstance(model.adapters, NoAdapters):
        raise AdapterError(f"the model '{model.model_id}' {model.adapters.reason}")


class ServedAdapters:
    """The adapters by their names; any thread may use them.

    One that is removed, or replaced, is there for as long as requests have it.
    """

    def __init__(self, model_names: Container[str]) -> None:
        """model_names: names that adapters cannot have."""
        self._model_names = model_names
        self._adapters: dict[str, ServedAdapter] = {}
        self._lock = Lock()

    @property
    def names(self) -> Iterable[str]:
        return [*self._adapters]

    def find(self, name: str) -> ServedAdapter | None:
        return self._adapters.get(name)

    def of(self, base: str) -> list[ServedAdapter]:
        """Return the adapters of a model, by its id."""
        return [each for each in [*self._adapters.values()] if each.base == base]

    def check_free(self, name: str, *, replaces: bool = False) -> None:
        """Check that an adapter of this name could be added.

        Raises:
            AdapterError: the name cannot be one of an adapter, or is in use, or there are too many adapters.
        """
        check_adapter_name(name)
        if name in self._model_names:
            raise AdapterError(f"a model is named '{name}'")
        if name in self._adapters:
            if not replaces:
                raise AdapterError(
                    f"the adapter '{name}' is loaded already; with load_inplace another one takes its place"
                )
        elif len(self._adapters) >= MAX_ADAPTERS:
            raise AdapterError(f"{MAX_ADAPTERS} adapters are loaded, which is the limit")

    def add(self, adapter: ServedAdapter, *, replaces: bool = False) -> None:
        """Serve an adapter.

        replaces: it may take the place of one with this name.

        Raises:
            AdapterError: see `check_free`.
        """
        with self._lock:
            self.check_free(adapter.name, replaces=replaces)
            self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> bool:
        """Serve an adapter no more; return whether there was one."""
        with self._lock:
            return self._adapters.pop(name, None) is not None
