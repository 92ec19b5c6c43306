"""Types of single fields, with their limits."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

EndReason = Literal["stop", "length", "tool_calls"]

# The keys are token ids; the engine knows the vocabulary, so it checks them there.
_MAX_LOGIT_BIASES: Final = 1024
_MAX_TOKEN_ID_DIGITS: Final = 9
# The table that finds one is made for each answer.
_MAX_STOP_LENGTH: Final = 1024


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def fault(message: str, param: str | None = None) -> PydanticCustomError:
    """Return what is wrong with a field; a rule over several of them names one by `param`."""
    told = {"message": message} | ({} if param is None else {"param": param})
    return PydanticCustomError("fault", "{message}", told)


def check_encodable(text: str) -> str:
    """Refuse half of a surrogate pair: JSON can write it, but it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "it contains half of a surrogate pair, which is no text"
        raise fault(message) from None
    return text


Text = Annotated[str, AfterValidator(check_encodable)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _with_token_ids(value: Any) -> Any:
    """Return a map with integer keys; JSON has strings only."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_ID_DIGITS):
            raise fault("its keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


StopStringList = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]],
    Field(max_length=4),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]

LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MAX_LOGIT_BIASES),
    BeforeValidator(_with_token_ids, json_schema_input_type=dict[str, float]),
]
