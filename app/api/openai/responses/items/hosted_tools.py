"""Tools that run at OpenAI, or that its models were trained to use: none of them runs here."""

from collections.abc import Iterator
from typing import Any, Final, Self

from pydantic import ConfigDict, model_validator

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Text, field_error, json_text

# Limits of the fields of a hosted tool besides its type.
_MAX_DEPTH: Final = 64
_MAX_CHARACTERS: Final = 512 * 1024

# What agents send with each request, beside functions that do without.
UNASKED: Final = frozenset(
    {
        "apply_patch",
        "image_generation",
        "local_shell",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)

_NO_COMPUTER: Final = "no model here was trained to use a computer"

# What only a client sends that counts on it, with the reason why it cannot.
REFUSED: Final = {
    "code_interpreter": "no code runs here; pass a function that runs it",
    "computer": _NO_COMPUTER,
    "computer_use": _NO_COMPUTER,
    "computer_use_preview": _NO_COMPUTER,
    "file_search": "there are no vector stores; pass what was found in the input, or a function",
    "mcp": "this server calls no others; let the client call it, and pass its tools as functions",
    "programmatic_tool_calling": "no code runs here; pass the functions themselves",
}


class HostedTool(RequestModel):
    """A tool that this server cannot run: it is kept out of the prompt, so no model calls it."""

    model_config = ConfigDict(extra="allow")

    type: Text

    @model_validator(mode="after")
    def _check_others(self) -> Self:
        json_text(self.model_extra, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
        return self

    def callable_tools(self) -> Iterator[Any]:
        return iter(())


def refuse(data: Any, param: str = "type") -> Any:
    """Raise PydanticCustomError for a hosted tool that cannot be left out, or that is to be called."""
    kind = data["type"]
    reason = REFUSED.get(kind, "pass a function that does the same")
    raise field_error(f"the tool {kind!r} does not run on this server: {reason}", param)
