"""`python -m app`: settings, model, then the server."""

import json
import logging
import os
import socket
import sys
from typing import Final

from app.main import create_app
from app.server import BindError, bind, serve
from app.settings import Settings, SettingsError, load_settings, unknown_variables
from batching import ModelLoadError, SchedulerManager

_CANNOT_START: Final = 2
_ENGINE_STOP_TIMEOUT: Final = 5.0

# Addresses that say "all of this machine's", which nobody can connect to by that name.
_REACHED_AS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    """Serve until a signal; return the exit status."""
    try:
        settings = load_settings()
        _log_to_stderr(settings.log_level)
        for line in unknown_variables(os.environ):
            _say(f"warning: {line}")
        return run(settings, SchedulerManager([settings.engine_config()]))
    except (SettingsError, BindError, ModelLoadError) as error:
        _say(str(error))
        return _CANNOT_START
    except KeyboardInterrupt:
        return 130


def run(settings: Settings, manager: SchedulerManager) -> int:
    """Serve the models of a manager.

    Raises:
        BindError: the address cannot be listened on.
        ModelLoadError: the default model cannot be found or read.
    """
    with bind(settings.host, settings.port) as sock:
        try:
            _say(f"loading {manager.model_ids[0]} ...")
            engine = manager.get(manager.model_ids[0])
            for line in (*engine.startup_lines, *_invitation(sock, engine.model.model_id)):
                _say(line)
            app = create_app(manager, max_choices=settings.max_choices)
            serve(app, sock, manager, settings.shutdown_timeout)
        finally:
            manager.close(_ENGINE_STOP_TIMEOUT)
    return 0


def _invitation(sock: socket.socket, model_id: str) -> list[str]:
    """Return the lines that say where the server is and how to ask it something."""
    url = base_url(*sock.getsockname()[:2])
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model_id, "messages": [message]})
    return [
        f"serving {model_id} at {url}; try:",
        f"  curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    ]


def base_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches the server."""
    host = _REACHED_AS.get(host, host)
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # uvicorn tells of each start and stop what we say ourselves; sse-starlette's debug
    # lines would log the text of answers.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("sse_starlette").setLevel(logging.INFO)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
