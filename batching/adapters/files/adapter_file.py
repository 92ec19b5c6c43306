"""Open adapters: their weights stay readable, and stay what they were, whatever happens to their folders."""

import hashlib
import json
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from batching.adapters.adapter import Adapter
from batching.adapters.files.adapter_config import CONFIG, PEFT_WEIGHTS, AdapterConfig, parse_config
from batching.adapters.files.kept_file import ContentsChanged, KeptFile, Stamp
from batching.adapters.files.matrices import LayerSizes, Matrices, check_places, matrices_of
from batching.adapters.files.numbers import decode, scaled
from batching.adapters.low_rank import LowRank
from batching.errors import AdapterChanged, AdapterError, printable
from batching.model_files.safetensors_header import PlacedTensor, read_placed

_MAX_CONFIG_BYTES: Final = 1 << 20
# Names of a hundred characters for ten thousand layers need 5 MB.
_MAX_HEADER_BYTES: Final = 8 << 20
# Rank 256 on all linear layers of a model of 70 billion weights takes 13 GB; all of it is read when it is opened.
_MAX_WEIGHTS_BYTES: Final = 16 << 30
_OTHER_FORMATS: Final = ("adapter_model.bin", "adapter_model.pt", "adapters.npz")


class AdapterFile:
    """The weights of an adapter, open.

    It is closed when nothing refers to it any more.

    adapter: what requests and plans name.
    layers: the sizes of its layers, by their paths in the model that it was made for.
    num_bytes: of the weights in the file.
    is_of_peft: whether PEFT has written it, and not mlx-lm.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Open the adapter of a folder, and read all of it: that takes as long as its disk does.

        name: what clients call it.

        Raises:
            AdapterError: it cannot be read, or is not served.
        """
        with _explained(folder):
            config = _read_config(folder)
            self._file = _open(folder, config.weights, _MAX_WEIGHTS_BYTES)
            try:
                self._matrices = _matrices(self._file, config)
                self._file.verify()
            except BaseException:
                self._file.close()
                raise
        self.is_of_peft = config.weights == PEFT_WEIGHTS
        self.layers: Mapping[str, LayerSizes] = {
            path: each.sizes for path, each in self._matrices.items()
        }
        self.num_bytes = sum(
            each.a.tensor.num_bytes + each.b.tensor.num_bytes for each in self._matrices.values()
        )
        rank = max(sizes.rank for sizes in self.layers.values())
        self.adapter = Adapter(name, str(folder.absolute()), self._digest(), rank)
        # Why its requests fail, and how the file was then.
        self._fault: tuple[str, Stamp] | None = None
        with _lock:
            _open_files.add(self)

    @property
    def is_open(self) -> bool:
        return self._file.is_open

    @property
    def is_intact(self) -> bool:
        """Whether it is open, and has what it had when it was opened."""
        try:
            self._file.verify()
        except (ContentsChanged, OSError):
            return False
        return True

    @property
    def fault(self) -> str | None:
        """Why its requests fail, unless something was done to the file since; reads nothing.

        Each that failed would cost all others of its step what they have computed.
        """
        with suppress(OSError):
            if self._fault is not None and self._file.stamp() == self._fault[1]:
                return self._fault[0]
        return None

    def close(self) -> None:
        self._file.close()

    def mark_failing(self, fault: str) -> None:
        """Record why its requests fail; `fault` is a message for clients."""
        with suppress(OSError):
            self._fault = fault, self._file.stamp()

    def read(self) -> dict[str, LowRank]:
        """Return the numbers of all layers, by their paths in the model that the adapter was made for.

        Raises:
            AdapterChanged: the file has others than when it was opened.
            AdapterError: it cannot be read, or is closed.
        """
        with _explained(Path(self.adapter.path)):
            try:
                self._file.verify()
                numbers = {path: self._numbers(each) for path, each in self._matrices.items()}
                self._file.verify()
            except ContentsChanged:
                raise AdapterChanged(self.adapter.name) from None
        return numbers

    def _numbers(self, layer: Matrices) -> LowRank:
        a, b = (
            self._matrix(each, is_transposed=layer.is_transposed) for each in (layer.a, layer.b)
        )
        kinds = {layer.a.tensor.type_name, layer.b.tensor.type_name}
        return LowRank(a, scaled(b, layer.scale), kinds.pop() if len(kinds) == 1 else "F32")

    def _matrix(self, placed: PlacedTensor, *, is_transposed: bool) -> np.ndarray:
        tensor, start = placed
        numbers = decode(self._file.read(start, tensor.num_bytes), tensor.type_name)
        matrix = numbers.reshape(tensor.shape)
        return np.ascontiguousarray(matrix.T if is_transposed else matrix)

    def _digest(self) -> str:
        # What else the configs say, the tensors say too, or it does not matter to what is computed.
        scales = {path: each.scale.hex() for path, each in self._matrices.items()}
        used = json.dumps([self._file.digest, scales], sort_keys=True)
        return hashlib.sha256(used.encode()).hexdigest()


_lock: Final = threading.Lock()
_open_files: Final = weakref.WeakSet[AdapterFile]()


def opened(adapter: Adapter) -> AdapterFile:
    """Return the open file of an adapter, or open its folder again.

    Raises:
        AdapterChanged: the folder has another one.
        AdapterError: it cannot be read.
    """
    for file in _files_of(adapter):
        if file.is_intact:
            return file
    try:
        return _opened_again(adapter)
    except AdapterError:
        mark_failing(adapter, str(AdapterChanged(adapter.name)))
        raise


def mark_failing(adapter: Adapter, fault: str) -> None:
    """Record for all open files of an adapter why its requests fail; see `AdapterFile.mark_failing`."""
    for file in _files_of(adapter):
        file.mark_failing(fault)


def _files_of(adapter: Adapter) -> list[AdapterFile]:
    with _lock:
        return [file for file in _open_files if file.adapter == adapter]


def _opened_again(adapter: Adapter) -> AdapterFile:
    file = AdapterFile(Path(adapter.path), adapter.name)
    if file.adapter != adapter:
        file.close()
        raise AdapterChanged(adapter.name)
    return file


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn whatever is wrong with an adapter into one line."""
    try:
        yield
        return
    except ContentsChanged:
        reason = "it is being written"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    raise AdapterError(f"cannot load the adapter {printable(str(folder))}: {printable(reason)}")


def _open(folder: Path, name: str, max_bytes: int) -> KeptFile:
    if not (folder / name).exists():
        for other in _OTHER_FORMATS:
            if (folder / other).exists():
                raise ValueError(f"it has {other}, and only safetensors are read")
        what = name if folder.is_dir() else "such folder"
        raise ValueError(f"there is no {what}")
    with _named(name):
        return KeptFile(folder / name, _root(folder), max_bytes)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _root(folder: Path) -> Path:
    """Return the folder that files may lie in: in the hub's cache, where snapshots are links, that of the repository."""
    resolved = folder.resolve()
    repository = resolved.parent.parent
    is_snapshot = resolved.parent.name == "snapshots" and repository.name.startswith("models--")
    return repository if is_snapshot else resolved


def _read_config(folder: Path) -> AdapterConfig:
    file = _open(folder, CONFIG, _MAX_CONFIG_BYTES)
    try:
        with _named(CONFIG):
            return parse_config(file.read(0, file.size))
    finally:
        file.close()


def _matrices(file: KeptFile, config: AdapterConfig) -> Mapping[str, Matrices]:
    with _named(config.weights):
        placed = read_placed(file.descriptor, _MAX_HEADER_BYTES)
        matrices = matrices_of(placed, config)
        check_places(placed, file.size)
        for path, each in matrices.items():
            for matrix, scale in ((each.a, 1.0), (each.b, each.scale)):
                if not _are_finite(file, matrix, scale):
                    raise ValueError(f"has numbers in {path} that are not finite")
        return matrices


def _are_finite(file: KeptFile, placed: PlacedTensor, scale: float) -> bool:
    tensor, start = placed
    return all(
        np.isfinite(scaled(decode(piece, tensor.type_name), scale)).all()
        for piece in file.pieces(start, tensor.num_bytes)
    )
