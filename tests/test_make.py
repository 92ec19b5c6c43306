"""What `make` says where something is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/c++", "there is no C++ compiler (/nowhere/c++)"),
        # It is a program, and the environment has nothing that builds or could install that.
        (sys.executable, "what builds them could not be installed"),
    ],
)
def test_without_what_builds_the_kernels_one_line_says_so(
    tmp_path: Path, compiler: str, reason: str
) -> None:
    (tmp_path / ".runtime").touch()
    done = subprocess.run(
        ["make", f"VENV={tmp_path}", f"--old-file={tmp_path / '.runtime'}", tmp_path / ".native"],
        cwd=ROOT,
        env=os.environ | {"CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "kernels" in line] == [
        f"no native CPU kernels: {reason}"
    ]
    assert (tmp_path / ".native").exists()


def planned(*arguments: str) -> str:
    """Return what make would run."""
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows what belongs to the kernels")
def test_the_sanitizers_run_once_for_each_change_of_the_kernels(tmp_path: Path) -> None:
    checked = tmp_path / "checked"
    everything = planned("test-native-changed", f"CHECKED={checked}")
    (now,) = re.findall(rf"^echo (\w+) >{checked}$", everything, re.MULTILINE)
    assert everything.count("-fsanitize=") == 2
    checked.write_text(f"{now}\n")
    assert "-fsanitize=" not in planned("test-native-changed", f"CHECKED={checked}")
    checked.write_text(f"{now[1:]}0\n")
    assert planned("test-native-changed", f"CHECKED={checked}") == everything
