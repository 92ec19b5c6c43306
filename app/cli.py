"""What the command does: settings, model, then the server."""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

from app.flags import name_flags, parse_flags
from app.main import create_app
from app.observability import logs
from app.observability.logs import print_stderr
from app.observability.tracing import TracingUnavailable, make_tracer
from app.server.uvicorn_server import BindError, bind, serve
from app.settings import Settings, SettingsError, env_name, load_settings, unknown_variables
from batching import ModelLoadError, PoolTooLarge, SchedulerManager, UnsupportedKVDType

_CANNOT_START: Final = 2
_ENGINE_STOP_TIMEOUT: Final = 5.0
_OWN_MACHINE: Final = ("127.0.0.1", "localhost", "::1")

# Addresses that mean all of this machine's, and the ones by which a client reaches it.
_REACHED_AS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(arguments: Sequence[str] = ()) -> int:
    """Serve until a signal; return the exit status."""
    flags: dict[str, str] = {}
    try:
        flags = parse_flags(arguments)
        settings = load_settings(flags)
        logs.configure(settings.log_level, settings.log_format)
        for line in (*unknown_variables(os.environ), *_security_warnings(settings)):
            print_stderr(f"warning: {line}")
        return run(settings, SchedulerManager([settings.engine_config()]))
    except PoolTooLarge as error:
        print_stderr(name_flags(f"{env_name('batch_block_pool_size')}: {error}", flags))
        return _CANNOT_START
    except UnsupportedKVDType as error:
        print_stderr(name_flags(f"{env_name('kv_cache_dtype')}: {error}", flags))
        return _CANNOT_START
    except (SettingsError, BindError, ModelLoadError, TracingUnavailable) as error:
        print_stderr(name_flags(str(error), flags))
        return _CANNOT_START


def run(settings: Settings, manager: SchedulerManager) -> int:
    """Serve the models of a manager; return the exit status.

    Raises:
        SettingsError: a key or the folder for data cannot be used.
        TracingUnavailable: a collector is named, and what talks to it is not installed.
        BindError: the address cannot be listened on.
        ModelLoadError: the default model cannot be found or read.
    """
    keys = settings.client_keys()
    tracer = make_tracer(os.environ)
    with bind(settings.host, settings.port) as sock, closing(settings.open_storage()) as storage:
        app = create_app(manager, settings, tracer, storage)
        try:
            print_stderr(f"loading {manager.model_ids[0]} ...")
            engine = manager.get(manager.model_ids[0])
            lines = [*engine.startup_lines, *_startup_banner(sock, engine.model.model_id, keys)]
            return serve(app, sock, on_listening=lambda: print_stderr("\n".join(lines)))
        finally:
            manager.close(_ENGINE_STOP_TIMEOUT)
            if tracer is not None:
                tracer.close()


def _security_warnings(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting that lets others in."""
    if not settings.client_keys() and settings.host not in _OWN_MACHINE:
        yield f"every client that reaches {settings.host} can use this server: there are no API keys"
    if settings.trust_remote_code:
        yield "code that comes with a model is run"


def _startup_banner(sock: socket.socket, model_id: str, keys: Sequence[str]) -> list[str]:
    """Return the lines that say where the server is and how to ask it something."""
    url = base_url(*sock.getsockname()[:2])
    message = {"role": "user", "content": "Can you tell me the capital of France?"}
    body = json.dumps({"model": model_id, "messages": [message]})
    key = " -H 'Authorization: Bearer <key>'" if keys else ""
    return [
        f"serving {model_id} at {url}; try:",
        f"  curl {url}/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    ]


def base_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches the server."""
    host = _REACHED_AS.get(host, host)
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
