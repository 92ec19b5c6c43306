"""The command: loads the settings and the model, and runs the server or a batch."""

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import FastAPI

from app.flags import FILES, RUN_BATCH, SERVE, name_flags, parse_flags
from app.http.browser_guard import is_loopback
from app.main import create_app
from app.observability import logs
from app.observability.logs import print_stderr
from app.observability.tracing import TracingUnavailable, make_tracer
from app.prompts.templates.template_sandbox import SANDBOX
from app.ranks.first_rank import first_rank
from app.ranks.other_rank import serve_other_rank
from app.ranks.plan import divided_model, rank_plan
from app.run_batch import BatchFailed, BatchPaths, serve_lines
from app.server.uvicorn_server import BindError, bind, serve
from app.settings import Settings, SettingsError, env_name, load_settings, unknown_variables
from app.settings.files import check_file
from app.settings.keys import client_keys
from app.settings.models import served_models
from app.settings.settings import served_name
from app.settings.storage import open_storage, temporary_storage
from app.storage.storage import Storage
from batching import (
    AdapterError,
    AdapterFile,
    Build,
    CannotJoin,
    ModelLoadError,
    ModelTooLarge,
    PoolTooLarge,
    RankLost,
    SchedulerManager,
    ServedModel,
    UnsupportedKVDType,
    memory_need,
    resolve_adapter,
    this_machine,
)

_CANNOT_START: Final = 2
_ENGINE_STOP_TIMEOUT: Final = 5.0
_GIB: Final = 1 << 30

# Addresses that mean all of this machine's, and the ones by which a client reaches it.
_REACHED_AS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class _CannotStart(Exception):
    """The system lacks something that the server needs; the message is one line for the operator."""


def main(arguments: Sequence[str] = ()) -> int:
    """Serve until a signal arrives (`serve`, or no word), or run a batch (`run-batch`); return the exit status."""
    flags: dict[str, str] = {}
    try:
        if arguments[:1] == [RUN_BATCH]:
            flags = parse_flags(arguments[1:], FILES)
            paths = BatchPaths(*(Path(flags.pop(name)) for name in FILES))
            settings = _load_settings(flags)
            if settings.ranks is not None:
                raise SettingsError(f"{env_name('ranks')} is for {SERVE}, not for {RUN_BATCH}")
            return run_batch(settings, make_manager(settings), paths)
        flags = parse_flags(arguments[1:] if arguments[:1] == [SERVE] else arguments)
        settings = _load_settings(flags)
        if settings.ranks is not None:
            return run_ranks(settings)
        for line in _security_warnings(settings):
            print_stderr(line, logging.WARNING)
        return run(settings, make_manager(settings))
    except PoolTooLarge as error:
        reason = f"{env_name('num_blocks')}: {error}"
    except UnsupportedKVDType as error:
        reason = f"{env_name('kv_cache_dtype')}: {error}"
    except RankLost as error:
        # What a rank is lost for has been said.
        return error.status
    except (
        CannotJoin,
        SettingsError,
        BindError,
        ModelLoadError,
        ModelTooLarge,
        AdapterError,
        TracingUnavailable,
        BatchFailed,
        _CannotStart,
    ) as error:
        reason = str(error)
    print_stderr(name_flags(reason, flags), logging.ERROR)
    return _CANNOT_START


def run(settings: Settings, manager: SchedulerManager) -> int:
    """Serve the models of a manager until a signal arrives; return the exit status.

    Raises:
        SettingsError: an API key is invalid, or a file or the data folder cannot be used.
        TracingUnavailable: a trace collector is configured, but its packages are not installed.
        BindError: the server cannot listen on the address.
        ModelLoadError: the default model cannot be found or read.
        _CannotStart: the system allows no child processes, or events cannot be published.
    """
    keys = client_keys(settings)
    if settings.warm_file is not None:
        check_file("warm_file", settings.warm_file)
    with (
        bind(settings.host, settings.port) as sock,
        closing(open_storage(settings)) as storage,
        _kv_events(settings, manager) as kv_events,
        _application(settings, manager, storage, kv_events) as app,
    ):
        lines = _load(manager)
        lines += _startup_banner(sock, manager.model_ids, keys, has_page=settings.web)
        return serve(app, sock, on_listening=lambda: print_stderr("\n".join(lines)))


def run_ranks(settings: Settings) -> int:
    """Serve a model that is divided among ranks, as one of them; return the exit status.

    Raises:
        CannotJoin: the ranks do not find each other.
        RankLost: one is gone, or differs from rank 0, before this one serves.
        and those of `run`.
    """
    plan = rank_plan(settings)
    model = divided_model(settings)
    if plan.rank:
        return serve_other_rank(plan, model.config, settings.ranks_timeout)
    for line in _security_warnings(settings):
        print_stderr(line, logging.WARNING)
    with first_rank(plan, settings) as first:
        manager = SchedulerManager([model], first.build, lost=lambda: first.lost)
        first.status = run(settings, manager)
        return first.status


def run_batch(settings: Settings, manager: SchedulerManager, paths: BatchPaths) -> int:
    """Serve the lines of a file with the models of a manager; return the exit status.

    Raises:
        TracingUnavailable: a trace collector is configured, but its packages are not installed.
        ModelLoadError: the default model cannot be found or read.
        BatchFailed: a file cannot be read or written, or the model fails.
        _CannotStart: the system allows no child processes.
    """
    if "log_level" not in settings.model_fields_set:
        logs.configure("warning", settings.log_format)
    with (
        closing(temporary_storage(settings)) as storage,
        _application(settings, manager, storage) as app,
    ):
        return serve_lines(app, paths, lambda: print_stderr("\n".join(_load(manager))))


@contextmanager
def _application(
    settings: Settings,
    manager: SchedulerManager,
    storage: Storage,
    kv_events: Mapping[str, Any] | None = None,
) -> Iterator[FastAPI]:
    """Make the app; on leaving the context, close the manager and the tracer."""
    tracer = make_tracer(os.environ)
    app = create_app(manager, settings, tracer, storage, kv_events)
    try:
        yield app
    finally:
        manager.close(_ENGINE_STOP_TIMEOUT)
        SANDBOX.close()
        app.state.service.images.close()
        if tracer is not None:
            tracer.close()


@contextmanager
def _kv_events(settings: Settings, manager: SchedulerManager) -> Iterator[Mapping[str, Any] | None]:
    """Publish the events of a manager's prefix cache; return where, None if they are not to be.

    Raises:
        SettingsError: only the replay has an endpoint.
        _CannotStart: packages are missing, or an endpoint cannot be used.
    """
    if settings.kv_events is None:
        if settings.kv_events_replay is not None:
            raise SettingsError(f"{env_name('kv_events_replay')} needs {env_name('kv_events')}")
        yield None
        return
    try:
        from app.observability.kv_events import CannotPublish, KVEventPublisher
    except ImportError:
        message = "the packages for it are not installed: pip install pyzmq msgspec"
        raise _CannotStart(f"{env_name('kv_events')}: {message}") from None
    try:
        publisher = KVEventPublisher(
            settings.kv_events,
            settings.kv_events_replay,
            topic=settings.kv_events_topic,
            buffer_steps=settings.kv_events_buffer,
        )
    except CannotPublish as error:
        raise _CannotStart(f"{env_name('kv_events')}: {error}") from None
    with closing(publisher):
        manager.engines.report_cache(manager.model_ids[0], publisher.publish)
        yield publisher.source


def make_manager(settings: Settings, build: Build | None = None) -> SchedulerManager:
    """Return the manager of the models that the settings name; none is loaded yet.

    build: see `SchedulerManager`.

    Raises:
        SettingsError: something is wrong with the settings of a model.
        ModelTooLarge: the pinned models do not fit.
        AdapterError: an adapter cannot be read.
    """
    models = served_models(settings, _found_models(settings))
    manager = _manager(settings, models, build)
    for model in models:
        for name, reference in model.adapters.items():
            file = AdapterFile(resolve_adapter(reference), name)
            manager.adapters.add(name, model.model_id, file, source=reference)
    return manager


def _manager(
    settings: Settings, models: Sequence[ServedModel], build: Build | None
) -> SchedulerManager:
    limit = settings.max_memory_gib
    if len(models) == 1 and limit is None:
        # Its load says whether it fits.
        return SchedulerManager(models, build)
    machine = this_machine(models[0].config)
    # What other programs have is theirs, unless the operator says what this one has.
    free = machine.memory if machine.free is None else min(machine.memory, machine.free)
    return SchedulerManager(
        models,
        build,
        capacity=free if limit is None else min(machine.memory, int(limit * _GIB)),
        min_resident=settings.min_resident,
        need=lambda config: memory_need(config, machine),
    )


def _found_models(settings: Settings) -> dict[str, str]:
    """Return references by the names of the models in the folders that the operator opens to requests."""
    if settings.models_dir is None and not settings.serve_hub_cache:
        return {}
    from app.commands.errors import CommandError
    from app.store.found import Place, find_models

    try:
        found = find_models(settings.models_dir)
    except CommandError as error:
        raise SettingsError(f"{env_name('models_dir')}: {error}") from None
    return {
        served_name(model.name): model.name
        for model in found
        if not model.problem
        and (
            model.place is Place.FOLDER or (model.place is Place.CACHE and settings.serve_hub_cache)
        )
    }


def _load(manager: SchedulerManager) -> list[str]:
    """Load the models that are to be loaded at the start; return what is to say of them.

    Raises:
        AdapterError: an adapter does not fit one of them.
    """
    try:
        SANDBOX.warm_up()
    except OSError as error:
        message = f"the processes that render chat templates cannot be started: {error}"
        raise _CannotStart(message) from None
    lines: list[str] = []
    for model in manager.models:
        if model.loads_at_start:
            print_stderr(f"loading {model.model_id} ...")
            engine = manager.get(model.model_id)
            for adapter in manager.adapters.of(model.model_id):
                engine.adapted(adapter.file)
            lines += engine.startup_lines
    return lines


def _load_settings(flags: dict[str, str]) -> Settings:
    settings = load_settings(flags)
    logs.configure(settings.log_level, settings.log_format)
    for line in unknown_variables(os.environ):
        print_stderr(line, logging.WARNING)
    return settings


def _security_warnings(settings: Settings) -> Iterator[str]:
    """Yield a warning for each setting that opens the server to others."""
    if not client_keys(settings) and not is_loopback(settings.host):
        yield f"every client that reaches {settings.host} can use this server: there are no API keys"
    for endpoint in filter(None, (settings.kv_events, settings.kv_events_replay)):
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and not is_loopback(parts.hostname or ""):
            yield f"all that reach {endpoint} can read prompts: it asks for no key"
    if settings.trust_remote_code:
        yield "code that comes with a model is run"


def _startup_banner(
    sock: socket.socket, model_ids: Sequence[str], keys: Sequence[str], *, has_page: bool
) -> list[str]:
    """Return the lines that say where the server listens and how to send it a request."""
    url = base_url(*sock.getsockname()[:2])
    message = {"role": "user", "content": "Can you tell me the capital of France?"}
    body = json.dumps({"model": model_ids[0], "messages": [message]})
    others = f" and {len(model_ids) - 1} other models" if len(model_ids) > 1 else ""
    key = " -H 'Authorization: Bearer <key>'" if keys else ""
    return [
        f"serving {model_ids[0]}{others} at {url}; try:",
        f"  curl {url}/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        *([f"  or open {url.removesuffix('/v1')} in a browser"] if has_page else []),
    ]


def base_url(host: str, port: int) -> str:
    """Return the URL at which the server can be reached from this machine."""
    host = _REACHED_AS.get(host, host)
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
