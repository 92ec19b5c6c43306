"""The locks: each package by version and by the hashes of its files, and from no place in particular."""

import re
from pathlib import Path
from typing import Final

import pytest

LOCKS: Final = sorted((Path(__file__).parent.parent / "requirements").glob("*.txt"))

# A package, perhaps on some systems only, and at least one hash.
PACKAGE: Final = re.compile(
    r"[\w.-]+(\[[\w, -]+\])?==[\w.+!-]+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_package_has_a_version_and_hashes(lock: Path) -> None:
    text = re.sub(r" *#.*\n", "", lock.read_text(encoding="utf-8"))
    assert PACKAGE.sub("", text) == ""
    assert "==" in text


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_no_address_is_written_down(lock: Path) -> None:
    assert "://" not in lock.read_text(encoding="utf-8")
