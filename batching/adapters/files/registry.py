"""Which adapters a server serves, by name."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from batching.adapters.adapter import Adapter
from batching.adapters.files.adapter_file import AdapterFile
from batching.errors import AdapterError, printable

_NAME: Final = re.compile(r"\w[\w./-]{0,127}", re.ASCII)
_MAX_ADAPTERS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter under the name that requests have for it.

    base: the id of the model that it is added to.
    file: keeps it open.
    source: the folder or hub id that it was loaded from, as it was written.
    """

    name: str
    base: str
    file: AdapterFile
    source: str

    @property
    def adapter(self) -> Adapter:
        return self.file.adapter


def _is_free(_: str) -> bool:
    return False


class AdapterRegistry:
    """The adapters of all models; each name is there once.  Any thread may use it."""

    def __init__(
        self, is_taken: Callable[[str], bool] = _is_free, max_adapters: int = _MAX_ADAPTERS
    ) -> None:
        """is_taken: whether a name is that of something else, such as a model."""
        self._is_taken = is_taken
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._served: dict[str, ServedAdapter] = {}

    def add(self, name: str, base: str, file: AdapterFile, *, source: str) -> ServedAdapter:
        """Serve an adapter.

        Raises:
            AdapterError: the name is none or taken, or there are too many.
        """
        self.check_name(name)
        served = ServedAdapter(name, base, file, source)
        with self._lock:
            if name in self._served:
                raise AdapterError(f"the adapter '{name}' is already loaded")
            if len(self._served) >= self._max_adapters:
                raise AdapterError(f"{self._max_adapters} adapters are loaded, which is the limit")
            self._served[name] = served
        return served

    def check_name(self, name: str) -> None:
        """Check that an adapter can have a name, if none has it yet.

        Raises:
            AdapterError: it is none, or that of a model.
        """
        shown = printable(name)
        if not _NAME.fullmatch(name):
            raise AdapterError(
                f"'{shown}' cannot be the name of an adapter: it may have 128 letters, digits and any of _ . - /"
            )
        if self._is_taken(name):
            raise AdapterError(f"'{shown}' is the name of a model")

    def replace(self, name: str, base: str, file: AdapterFile, *, source: str) -> ServedAdapter:
        """Serve an adapter in place of that of its name, if there is one of this base.

        Raises:
            AdapterError: as `add`, or the name is that of another base's.
        """
        with self._lock:
            former = self._served.get(name)
            if former is not None and former.base == base:
                served = self._served[name] = ServedAdapter(name, base, file, source)
                return served
        return self.add(name, base, file, source=source)

    def remove(self, name: str) -> ServedAdapter | None:
        """Serve an adapter no more; None if there is none.  Who holds its file can go on reading it."""
        with self._lock:
            return self._served.pop(name, None)

    def find(self, reference: str) -> ServedAdapter | None:
        """Return the adapter of a name, or of `base:name`."""
        base, colon, name = reference.rpartition(":")
        with self._lock:
            served = self._served.get(name)
        is_one = served is not None and (not colon or base == served.base)
        return served if is_one else None

    @property
    def names(self) -> list[str]:
        """The names of all, in the order in which they were added."""
        with self._lock:
            return [*self._served]

    def of(self, base: str) -> list[ServedAdapter]:
        """Return the adapters of a model, in the order in which they were added."""
        with self._lock:
            return [each for each in self._served.values() if each.base == base]
