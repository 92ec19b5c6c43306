"""The chat template of a model, rendered with a bound on what it takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.prompts.templates.template_sandbox import SANDBOX, rendered
from batching import ModelInfo, Tokenizer


def render_turns(model: ModelInfo, turns: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Return the prompt of a conversation; blocking.

    What is no template but a function of mlx-lm or of the tokenizer is called here.

    Raises:
        Exception: whatever the template raises; TemplateFailed if another process renders it, or RendererLost.
    """
    tokenizer: Any = model.tokenizer
    if not model.has_jinja_template:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **variables))
    template = tokenizer.get_chat_template(None, variables.get("tools"))
    return rendered(SANDBOX, template, turns, template_variables(tokenizer, variables))


def template_variables(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a template gets beside the turns, as transformers gives it."""
    special_tokens: Mapping[str, Any] = getattr(tokenizer, "special_tokens_map", {})
    return {**special_tokens, **variables}
