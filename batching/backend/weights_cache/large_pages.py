"""Whether the system maps a file in large pages, without which reading weights takes longer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_MAPPINGS: Final = Path("/proc/self/smaps_rollup")
# Of what was mapped.
_LEAST_SHARE: Final = 0.5


def maps_large_pages(
    kernels: Any, layout: Mapping[str, int], num_bytes: int, descriptor: int, offset: int
) -> bool:
    """Map packed weights of a file, and tell whether that was in large pages.

    Linux does so where the file system keeps files in large pages, as newer versions of ext4 and
    XFS do.
    """
    before = _large_bytes()
    mapped = kernels.stored_weights(layout, num_bytes, descriptor, offset, True)
    share = (_large_bytes() - before) / num_bytes
    del mapped
    return share >= _LEAST_SHARE


def _large_bytes() -> int:
    try:
        found = re.search(r"^FilePmdMapped: +(\d+) kB$", _MAPPINGS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
