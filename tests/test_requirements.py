"""The locks: each package by version and by the hashes of its files, and from no place in particular."""

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
LOCKS: Final = sorted((ROOT / "requirements").glob("*.txt"))

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


def pinned(lock: str, package: str) -> str:
    """Return `package==version`, as a lock has it."""
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    # Some are there with an extra, too.
    [found] = set(re.findall(rf"^{package}(?:\[\w+\])?==([\w.]+)", text, re.MULTILINE))
    return f"{package}=={found}"


def test_the_kernels_are_built_against_the_mlx_that_is_installed() -> None:
    """In an isolated build too, where pyproject.toml says what there is."""
    project = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text(encoding="utf-8"))
    mlx, nanobind = pinned("default.txt", "mlx"), pinned("native.txt", "nanobind")
    built_with = {name.replace("[cpu]", "") for name in project["build-system"]["requires"]}
    assert {mlx, nanobind} <= built_with
    assert mlx in project["project"]["dependencies"]
