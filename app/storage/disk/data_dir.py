"""The default folders for what outlives a process."""

import os
import sys
from pathlib import Path
from typing import Final

_NAME: Final = "mlx-batch-server"


def default_data_dir() -> Path:
    """Return the platform's folder for a program's user data, on Linux by the XDG specification."""
    return _folder("XDG_DATA_HOME", "share")


def default_state_dir() -> Path:
    """Return the platform's folder for what a program keeps of its use, such as a history."""
    return _folder("XDG_STATE_HOME", "state")


def _folder(variable: str, name: str) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / _NAME
    configured = os.environ.get(variable, "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".local" / name
    return base / _NAME
