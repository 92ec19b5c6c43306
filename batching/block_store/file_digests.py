"""Digests of what files contain, which are remembered as long as these do not change."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from batching.host.private_files import check_folder, replace_private

_FILE: Final = "digests.json"
_PIECE_BYTES: Final = 1 << 24


class FileDigests:
    """XXH3 (128 bits) of whole files; a file in a folder has those of all that it was asked for."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which is made if it is not there.

        Raises:
            OSError: it cannot be used, or others can change it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)
        self._file = folder / _FILE
        # By path: size, times, inode and device, and the digest.
        self._known: dict[str, list[object]] = {}
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._file.read_text(encoding="utf-8")).items()
            self._known = {path: state for path, state in found if isinstance(state, list)}

    def of(self, files: Iterable[Path]) -> dict[str, str]:
        """Return the digests of files by their names.

        Raises:
            OSError: one cannot be read.
        """
        found = {path.name: self._of(path) for path in files}
        with suppress(OSError):
            replace_private(self._file, json.dumps(self._known))
        return found

    def _of(self, path: Path) -> str:
        stat = path.stat()
        # Tools set the time of the contents, and none that of the last change.
        times = [stat.st_mtime_ns, stat.st_ctime_ns]
        state = [stat.st_size, *times, stat.st_ino, stat.st_dev]
        known = self._known.get(str(path.resolve()))
        if known is not None and known[:-1] == state:
            return str(known[-1])
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        self._known[str(path.resolve())] = [*state, digest.hexdigest()]
        return digest.hexdigest()
