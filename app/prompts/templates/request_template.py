"""A model with the chat template of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from jinja2 import TemplateSyntaxError

from app.prompts.templates import template_process
from app.prompts.templates.model_template import template_variables
from app.prompts.templates.template_sandbox import TemplateFailed, TemplateTooMuch, rendered
from batching import InvalidRequest, ModelInfo, Sandbox, SandboxLimits, Tokenizer

PARAM: Final = "chat_template"
# A process renders one template only, since it may be any client's.
_SANDBOX: Final = Sandbox(
    template_process.__file__, SandboxLimits(cpu_seconds=2), wall_seconds=10.0, num_kept=0
)


def check_template(template: str) -> None:
    """Raise ValueError, with the line, if a template cannot be compiled."""
    try:
        template_process.environment().from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None


def with_template(model: ModelInfo, template: str) -> ModelInfo:
    """Return a model that renders conversations by another template; the rest is unchanged."""
    templated = cast(Tokenizer, _Templated(model.tokenizer, template))
    return replace(model, tokenizer=templated, has_jinja_template=False, base=None)


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


def render(template: str, turns: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a template in a process of its own; blocking.

    Raises:
        InvalidRequest: the template fails, or takes too much.
        RendererLost: the process was killed, or had no time.
    """
    try:
        return rendered(_SANDBOX, template, turns, variables)
    except TemplateTooMuch:
        raise InvalidRequest(PARAM, "the template takes too much time or memory") from None
    except TemplateFailed as error:
        # Its own message only: that of another error may hold a part of the prompt.
        known = f": {error.reason}" if error.reason and error.reason in template else ""
        message = f"the template fails with this request ({error.kind}){known}"
        raise InvalidRequest(PARAM, message) from None
