"""A model with the chat template of one request."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from jinja2 import TemplateSyntaxError

from app.prompts import template_process
from app.prompts.model_template import template_variables
from app.prompts.render_pool import RendererLost
from batching import InvalidRequest, ModelInfo, Tokenizer, interruptible, was_killed

PARAM: Final = "chat_template"
# The process has two seconds of a core, and to exceed them is its fault; on a loaded machine it gets less
# than a core.
_WALL_SECONDS: Final = 10.0
_TOO_MUCH: Final = "the template takes too much time or memory"


def check_template(template: str) -> None:
    """Raise ValueError, with the line, if a template cannot be compiled."""
    try:
        template_process.environment().from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None


def with_template(model: ModelInfo, template: str) -> ModelInfo:
    """Return a model that renders conversations by another template; the rest is unchanged."""
    templated = cast(Tokenizer, _Templated(model.tokenizer, template))
    return replace(model, tokenizer=templated, has_jinja_template=False)


class _Templated:
    """A tokenizer with a template of its own, which is rendered in another process."""

    has_chat_template = True

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **kwargs: Any
    ) -> str:
        """Return the text of a conversation.

        Raises:
            InvalidRequest: the template fails, or takes too much.
            RendererLost: the process was killed, or had no time.
        """
        assert not tokenize, "the text is what is asked for"
        variables = template_variables(self._tokenizer, kwargs)
        return render(self.chat_template, conversation, variables)


def render(
    template: str,
    turns: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    wall_seconds: float = _WALL_SECONDS,
) -> str:
    """Render a template in a process of its own; blocking.

    Raises:
        InvalidRequest: the template fails, or takes too much.
        RendererLost: the process was killed, or had no time.
    """
    # -I: no variable of the environment and no module beside the file is taken notice of.
    command = [sys.executable, "-I", template_process.__file__]
    encoded = json.dumps([template, turns, variables], default=str).encode()
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, env={})
    with process, interruptible(process.kill):
        try:
            output, _ = process.communicate(encoded, wall_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RendererLost from None
    if was_killed(process.returncode):
        raise RendererLost
    if process.returncode != 0:
        raise InvalidRequest(PARAM, _TOO_MUCH)
    answer = json.loads(output)
    if "text" in answer:
        return str(answer["text"])
    # Its own message only: that of another error may hold a part of the prompt.
    message = answer["message"]
    known = f": {message}" if message and message in template else ""
    raise InvalidRequest(PARAM, f"the template fails with this request ({answer['error']}){known}")
