"""Prompts to tokens: the chat template, and the tokenizer.  Blocking, so not for the event loop."""

from collections.abc import Sequence

from jinja2 import TemplateError

from app.schemas.chat import ChatMessage
from batching import InvalidRequest, ModelInfo


def chat_prompt(model: ModelInfo, messages: Sequence[ChatMessage]) -> list[int]:
    """Render the conversation with the model's template, up to where the answer begins.

    Raises:
        InvalidRequest: the model has no template, or its template refuses the conversation.
    """
    if not model.tokenizer.has_chat_template:
        raise InvalidRequest(
            "model", f"the model '{model.model_id}' has no chat template; use /v1/completions"
        )
    conversation = [message.template_fields() for message in messages]
    try:
        return model.tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    except TemplateError as error:
        message = f"the model's chat template refuses the messages: {error}"
        raise InvalidRequest("messages", message) from None


def completion_prompt(model: ModelInfo, prompt: str | list[int]) -> list[int]:
    """Return the tokens of a text; tokens are taken as they are."""
    return model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
