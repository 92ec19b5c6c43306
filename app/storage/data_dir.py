"""The default folder for data that outlives the server."""

import os
import sys
from pathlib import Path
from typing import Final

_NAME: Final = "mlx-batch-server"


def default_data_dir() -> Path:
    """Return the platform's folder for a program's user data, on Linux by the XDG specification."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / _NAME
    configured = os.environ.get("XDG_DATA_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".local" / "share"
    return base / _NAME
