"""What was checked: device, versions, commit."""

import subprocess
from datetime import UTC, datetime
from typing import Final

import mlx.core as mx

from scripts.gpu_check.processes import ROOT
from scripts.machine import describe

_GIB: Final = 1 << 30
_MEMORY_KEYS: Final = ("max_recommended_working_set_size", "total_memory", "memory_size")


def device_facts(device: str) -> dict[str, str]:
    """Return the facts of a machine and its device for the report, in order."""
    machine = describe()
    kind, name, memory = "CPU (dry run)", str(machine["cpu"]), float(machine["memory_gib"]) * _GIB
    if device == "gpu":
        kind = "CUDA" if mx.cuda.is_available() else "Metal"
        info = mx.device_info()
        name = str(info.get("device_name", name))
        memory = next((float(info[key]) for key in _MEMORY_KEYS if key in info), memory)
    return {
        "device": f"{name}, {kind}",
        "chip": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        "memory for arrays": f"{memory / _GIB:.1f} GiB",
        "MLX": f"{machine['mlx']}, mlx-lm {machine['mlx-lm']}",
        "OS": f"{machine['os']}, Python {machine['python']}",
        "commit": _commit(),
        "began": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _commit() -> str:
    """Return the commit of this checkout, and whether files differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "not a checkout"
    return f"{commit}, with changes" if _git("status", "--porcelain", "-uno") else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
