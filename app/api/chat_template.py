"""Chat templates of requests, if the operator allows them."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import Request

from app.api.serving import client_of, prepared
from app.prompts.templates.request_template import PARAM, with_template
from app.server_state import server_state
from app.settings import env_name
from batching import InvalidRequest, ModelInfo

T = TypeVar("T")


async def run_with_template(
    request: Request, model: ModelInfo, template: str | None, function: Callable[[ModelInfo], T]
) -> T:
    """Call a blocking function with the model, whose template is the request's if it has one.

    Raises:
        InvalidRequest: the operator allows no such template.
    """
    state = server_state(request)
    if template is None:
        return await prepared(request, partial(function, model))
    if not state.settings.allow_request_chat_template:
        setting = f"{env_name('allow_request_chat_template')}=true"
        raise InvalidRequest(PARAM, f"a request cannot set it here without the setting {setting}")
    templated = with_template(model, template)
    return await state.threads.templates.run(partial(function, templated), client_of(request).name)
