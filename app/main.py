"""Where the parts of the HTTP side meet."""

from time import time
from typing import Final

import anyio
from fastapi import FastAPI

from app import errors
from app.endpoints import chat, completions, health, models, tokenize
from batching import SchedulerManager

_MAX_COMPILED_AT_ONCE: Final = 2


def create_app(manager: SchedulerManager, *, max_choices: int = 16) -> FastAPI:
    """Return the app over the engines of a manager, which the caller closes.

    `max_choices` bounds the answers to one prompt.
    """
    app = FastAPI(title="mlx-batch-server", redirect_slashes=False)
    app.state.manager = manager
    app.state.max_choices = max_choices
    # Compiling takes a core each; who waits for it keeps nobody else waiting.
    app.state.compiling = anyio.CapacityLimiter(_MAX_COMPILED_AT_ONCE)
    app.state.started = int(time())
    errors.install(app)
    for endpoint in (chat, completions, tokenize, models, health):
        app.include_router(endpoint.router)
    return app
