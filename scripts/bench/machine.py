"""What the numbers were measured on."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

Machine = dict[str, str | int | float]

_PACKAGES: Final = ("mlx", "mlx-lm", "httpx")
_UNKNOWN: Final = "unknown"


def describe() -> Machine:
    """Return the machine and the versions; the servers may be elsewhere, which a note can say."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(_memory() / 2**30, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def in_words(machine: Machine) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['os']}, Python {machine['python']}, mlx {machine['mlx']}"
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or _UNKNOWN


def _sysctl(name: str) -> str:
    """Return what a Mac says of itself; nothing elsewhere."""
    try:
        told = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return told.stdout.strip()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
