"""How much a model reasons, and further variables of the chat template."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import INT32_MAX, check_agreement, field_error, json_text

# Tokens of reasoning; -1 is no limit.
ThinkingTokens = Annotated[int, Field(ge=-1, le=INT32_MAX)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_MAX_CHARACTERS: Final = 64 * 1024
# Templates walk through what they get recursively.
_MAX_DEPTH: Final = 32

# Variables that the server sets, that would change how the template is found or rendered, that
# templates call, and the texts of special tokens.
RESERVED: Final = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "self",
        "raise_exception",
        "strftime_now",
        "namespace",
        "dict",
        "range",
        "lipsum",
        "cycler",
        "joiner",
        "loop",
        "caller",
        "super",
        "varargs",
        "kwargs",
        "additional_special_tokens",
        "extra_special_tokens",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    }
)


def _check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    json_text(kwargs, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
    for name in kwargs:
        if name in RESERVED or name.startswith("_"):
            raise field_error(f"{name[:40]!r} cannot be set by a request")
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]


class Thinking(RequestModel):
    """Anthropic's, DeepSeek's and GLM's switch; a boolean is one, too."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: ThinkingTokens | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.type == "disabled" and self.budget_tokens is not None:
            raise field_error("it cannot be combined with type: disabled", "budget_tokens")
        return self

    @property
    def switch(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class Reasoning(RequestModel):
    """OpenRouter's, and OpenAI's of another API."""

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingTokens | None = None
    enabled: bool | None = None
    exclude: bool = False


_NOTHING: Final = Reasoning()


def _as_switch(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


class ReasoningOptions(RequestModel):
    """The several ways to say how much a model reasons, and whether that is returned."""

    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    enable_thinking: bool | None = Field(
        default=None, description="Or `thinking`; a variable of the chat template."
    )
    thinking: Annotated[
        Thinking | None, BeforeValidator(_as_switch, json_schema_input_type=Thinking | bool | None)
    ] = None
    reasoning: Reasoning | None = None
    thinking_token_budget: ThinkingTokens | None = Field(
        default=None,
        description="vLLM's: after so many tokens of reasoning its end is forced; -1 is no limit.  Also "
        "`thinking_budget_tokens`, `thinking.budget_tokens` and `reasoning.max_tokens`.",
    )
    thinking_budget_tokens: ThinkingTokens | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        kwarg = self.chat_template_kwargs.get("enable_thinking")
        check_agreement({"chat_template_kwargs": kwarg} | self._switches)
        effort = (self.reasoning or _NOTHING).effort
        check_agreement({"reasoning_effort": self.reasoning_effort, "reasoning": effort})
        check_agreement(self._budgets)
        return self

    @property
    def effort(self) -> str | None:
        """The effort that is asked for; None leaves it to the model's template."""
        return self.reasoning_effort or (self.reasoning or _NOTHING).effort

    @property
    def thinking_switch(self) -> bool | None:
        """Whether the model is to reason; None leaves that to its template."""
        return next((each for each in self._switches.values() if each is not None), None)

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning; None is no limit."""
        budget = next((each for each in self._budgets.values() if each is not None), -1)
        return None if budget < 0 else budget

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning and not (self.reasoning or _NOTHING).exclude

    @property
    def _switches(self) -> dict[str, bool | None]:
        return {
            "enable_thinking": self.enable_thinking,
            "thinking": None if self.thinking is None else self.thinking.switch,
            "reasoning": (self.reasoning or _NOTHING).enabled,
        }

    @property
    def _budgets(self) -> dict[str, int | None]:
        return {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget_tokens": self.thinking_budget_tokens,
            "thinking.budget_tokens": None
            if self.thinking is None
            else self.thinking.budget_tokens,
            "reasoning.max_tokens": (self.reasoning or _NOTHING).max_tokens,
        }
