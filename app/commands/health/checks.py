"""The checks of `doctor`, in the order in which what one needs comes before it."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from huggingface_hub import constants

from app.commands.errors import CommandError
from app.commands.health.finding import Finding, bad, note, ok
from app.commands.health.self_test import self_test
from app.commands.output import GIB, size_text
from app.server.uvicorn_server import BindError, bind
from app.settings import Settings, SettingsError, load_settings
from app.settings.configs import engine_config
from app.storage.disk.data_dir import default_data_dir
from app.store.found import find_model
from batching import (
    BackendReport,
    EngineConfig,
    ModelLoadError,
    describe,
    estimate,
    report_backend,
    stored_bytes,
    this_machine,
)

_LEAST_PYTHON: Final = (3, 11)
# Room for a model of 8 billion weights in 4 bits.
_ROOM_FOR_A_MODEL: Final = 5 * GIB
# What the bundled model takes with the least pool.
_LEAST_MEMORY: Final = GIB // 2


def all_checks(*, has_self_test: bool) -> Iterator[Finding]:
    """Yield what each check finds, as soon as it does."""
    yield check_python(sys.version_info[:3])
    try:
        settings = load_settings()
        config = engine_config(settings)
    except SettingsError as error:
        # All else depends on them.
        yield bad("settings", " ".join(str(error).split("\n")))
        return
    yield ok("settings", "valid")
    yield from check_backend(config)
    yield check_folder("hub cache", Path(constants.HF_HUB_CACHE), room=_ROOM_FOR_A_MODEL)
    yield from check_data(settings)
    yield from check_kv_cache(settings)
    yield check_port(settings)
    yield check_model(settings, config)
    if has_self_test:
        yield self_test(config)


def check_python(version: tuple[int, ...]) -> Finding:
    text = f"{'.'.join(map(str, version))}, {platform.machine()}"
    if version < _LEAST_PYTHON:
        return bad("python", f"{text}: install 3.11 or newer")
    return ok("python", text)


def check_backend(config: EngineConfig) -> Iterator[Finding]:
    """Yield what MLX is and has."""
    try:
        report = report_backend(config)
    except (ModelLoadError, ImportError) as error:
        yield bad("mlx", str(error))
        return
    yield ok("mlx", f"{report.mlx_version} on {report.device}")
    yield _memory(config, report)
    if report.wired is not None:
        yield _wired(report)
    kernels = ok if report.has_kernels or config.native == "off" else note
    yield kernels("kernels", report.kernels)


def _memory(config: EngineConfig, report: BackendReport) -> Finding:
    free = this_machine(config).free
    left = report.memory if free is None else min(free, report.memory)
    text = f"{size_text(report.memory)}, of which {size_text(left)} are free"
    if left < _LEAST_MEMORY:
        needed = size_text(_LEAST_MEMORY)
        return bad("memory", f"{text}: the smallest model takes {needed}; end other programs")
    return ok("memory", text)


def _wired(report: BackendReport) -> Finding:
    """Say how much macOS lets a GPU keep in place, which is the most that a model may take."""
    wired = report.wired or 0
    how = f"sudo sysctl iogpu.wired_limit_mb={report.memory * 5 // 4 >> 20} allows more"
    return ok("wired limit", f"{size_text(wired)}; {how}")


def check_folder(name: str, folder: Path, *, room: int = 0) -> Finding:
    """Check that a folder can be written, or be made, and has some room."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return bad(name, f"{folder} cannot be written: change its owner, or set another folder")
    free = shutil.disk_usage(there).free
    text = f"{folder}, {size_text(free)} free"
    return note(name, f"{text}: little for a model") if free < room else ok(name, text)


def check_data(settings: Settings) -> Iterator[Finding]:
    try:
        yield check_folder("data folder", settings.data_dir or default_data_dir())
    except RuntimeError as error:
        # Path raises it where no home directory is known.
        yield note("data folder", f"{error}: what is stored ends with the server")


def check_kv_cache(settings: Settings) -> Iterator[Finding]:
    """Check the folder of keys and values, if one is set."""
    name, folder = "kv cache", settings.kv_cache_dir
    if folder is None:
        return
    found = check_folder(name, folder)
    if not found.is_good or not folder.exists():
        yield found
        return
    try:
        size = stored_bytes(folder)
    except OSError as error:
        yield bad(name, f"{folder} is not used: {error.strerror}")
        return
    text = f"{found.text}, has {size_text(size)} of {size_text(settings.kv_cache_gib * GIB)}"
    free, missing = shutil.disk_usage(folder).free, settings.kv_cache_gib * GIB - size
    yield note(name, f"{text}: the disk is too small") if free < missing else ok(name, text)


def check_port(settings: Settings) -> Finding:
    try:
        bind(settings.host, settings.port).close()
    except BindError as error:
        return bad("port", f"{error}: end what uses it, or set another --port")
    return ok("port", f"{settings.host} port {settings.port} is free")


def check_model(settings: Settings, config: EngineConfig) -> Finding:
    """Check that the files of the model of the settings are here, whole, and fit."""
    name = settings.model
    pull = f"mlx-batch-server models pull {name}"
    try:
        found = find_model(name, settings.models_dir)
        if found is None:
            return note("model", f"{name} is downloaded at the first start; {pull} does it now")
        if found.problem:
            return bad("model", f"{name} is {found.problem}; {pull} completes it")
        machine = this_machine(config)
        needs = estimate(describe(found.path), config, machine.compute)
    except (CommandError, ModelLoadError) as error:
        return bad("model", str(error))
    if missing := machine.missing(needs.least):
        advice = "take a smaller model, or a KV cache of 8 bits"
        return bad("model", f"{name} does not fit, {size_text(missing)} are missing: {advice}")
    return ok("model", f"{name}, {size_text(found.size)}, needs {size_text(needs.least)} at least")
