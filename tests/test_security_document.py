"""SECURITY.md names tests and settings that there are."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

from app.settings import Settings, env_name

ROOT: Final = Path(__file__).parent.parent
TEXT: Final = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def named_tests() -> list[tuple[str, str]]:
    """Return the tests that are named, each with the file that is named before it."""
    named, path = [], ""
    for code in re.findall(r"`([^`\s]+)`", TEXT):
        if code.startswith("tests/") and code.endswith(".py"):
            path = code
        elif code.startswith("test_"):
            named.append((path, code))
    return named


def test_every_test_that_is_named_is_there() -> None:
    named = named_tests()
    assert len(named) > 30
    assert [f"{path}: {name}" for path, name in named if name not in functions_in(path)] == []


def test_every_setting_that_is_named_is_one() -> None:
    known = {env_name(field) for field in Settings.model_fields}
    assert set(re.findall(r"MLX_SERVER_[A-Z_]+", TEXT)) - known == set()


def test_every_class_of_attack_has_a_test() -> None:
    _, _, table = TEXT.partition("| class |")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) >= 10
    assert [row for row in rows if "`test_" not in row] == []
