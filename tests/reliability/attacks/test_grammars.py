"""Tools that clients define: what is made of them, to write grammars and to read calls, ends in time."""

import random
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.support.grammar_attacks import LARK, SCHEMAS
from tests.support.weekly import WEEK

pytestmark = pytest.mark.timeout(120)

# What one client may send; 500 would be an exception.
ANSWERED = {"200", "400"}


def statuses(names: Iterable[str]) -> list[str]:
    """Return those of the answers to attacks, each of which has some seconds of a core."""
    command = [sys.executable, "-m", "tests.support.grammar_attacks", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [*done.stdout.split(), *([f"ended by {done.returncode}"] if done.returncode else [])]


@pytest.mark.parametrize("num_lark", [4, pytest.param(len(LARK), marks=pytest.mark.slow)])
def test_what_tools_become_is_bounded(num_lark: int) -> None:
    attacks = [*SCHEMAS, *random.Random(WEEK).sample([*LARK], num_lark)]
    answers = statuses(attacks)
    assert len(answers) == len(attacks), answers
    assert set(answers) <= ANSWERED
