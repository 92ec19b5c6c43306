"""Types of single fields, with their limits."""

import json
from collections.abc import Iterable, Mapping, Sized
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

# The keys are token ids; the engine knows the vocabulary, so it checks them there.
_MAX_LOGIT_BIASES: Final = 1024
_MAX_TOKEN_ID_DIGITS: Final = 9
_MAX_SHOWN_KEYS: Final = 64
# The table that finds one is built for each sequence, and each character is compared with all of them.
MAX_STOP_STRINGS: Final = 32
_MAX_STOP_LENGTH: Final = 1024

MAX_SCHEMA_LENGTH: Final = 128 * 1024
_MAX_SCHEMA_DEPTH: Final = 100

# The largest vocabularies have as many tokens.
MAX_TOKEN_IDS: Final = 1 << 18

# Turns or items of a conversation: validating one takes some five microseconds of the event loop.
MAX_MESSAGES: Final = 8192

INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_MAX_TIMEOUT: Final = 86_400

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)]
Timeout = Annotated[
    float | None,
    Field(
        gt=0,
        le=_MAX_TIMEOUT,
        description="Seconds after which the request ends with an error, waiting or running; "
        "the header `X-Request-Timeout` means the same.",
    ),
]


def field_error(message: str, param: str | None = None) -> PydanticCustomError:
    """Return the error of a field; a rule over several fields names one of them by `param`."""
    context = {"message": message} | ({} if param is None else {"param": param})
    return PydanticCustomError("invalid", "{message}", context)


def check_encodable(text: str) -> str:
    """Reject a lone surrogate: JSON can express it, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "it contains half of a surrogate pair, which is no text"
        raise field_error(message) from None
    return text


Text = Annotated[str, AfterValidator(check_encodable)]
Id = Annotated[Text, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=16),
]
CacheSalt = Annotated[Text, Field(min_length=1, max_length=1024)]
# Calls may come from other servers, which name them freely.
GivenName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(check_encodable)]


def check_agreement(values: Mapping[str, object]) -> None:
    """Reject a field that differs from another one which means the same; None says nothing."""
    said = [(name, value) for name, value in values.items() if value is not None]
    for (first, value), (name, other) in pairwise(said):
        if value != other:
            raise field_error(f"{first} says something else", name)


def check_length(value: Sized, limit: int) -> None:
    """Reject a value of too many parts before each is looked at."""
    if len(value) > limit:
        raise field_error(f"it has {len(value)} items, and {limit} are the most")


def json_text(value: Any, *, max_depth: int, max_characters: int) -> str:
    """Return a value as JSON; reject one that JSON cannot express or that exceeds the limits."""
    # Each value in it takes a character and a comma.
    check_size(value, max_depth=max_depth, max_values=max_characters // 2)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise field_error("it contains NaN or Infinity") from None
    if len(text) > max_characters:
        raise field_error(f"it is longer than {max_characters} characters")
    return check_encodable(text)


def check_size(value: Any, *, max_depth: int, max_values: int) -> None:
    """Reject a value of too many values, looking at no more of them than allowed."""
    level, num_values = [value], 0
    for _ in range(max_depth + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        num_values += sum(map(len, containers))
        if num_values > max_values:
            raise field_error(f"it has more than {max_values} values")
        level = [child for parent in containers for child in _children(parent)]
    if level:
        raise field_error(f"it is nested deeper than {max_depth} levels")


def _children(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _with_token_ids(value: Any) -> Any:
    """Return a map with integer keys; JSON has strings only."""
    if not isinstance(value, dict):
        return value
    check_length(value, _MAX_LOGIT_BIASES)
    if wrong := [key for key in value if not _is_token_id(key)]:
        raise field_error(f"its keys must be token ids: {', '.join(wrong)[:_MAX_SHOWN_KEYS]!r}")
    return {int(key): bias for key, bias in value.items()}


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_TOKEN_ID_DIGITS


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Reject a schema that is too long or nested too deep."""
    json_text(schema, max_depth=_MAX_SCHEMA_DEPTH, max_characters=MAX_SCHEMA_LENGTH)
    return schema


JsonSchema = Annotated[dict[str, Any], AfterValidator(_check_schema)]

StopString = Annotated[Text, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]

StopStringList = Annotated[
    StopStrings, BeforeValidator(as_list, json_schema_input_type=StopString | StopStrings)
]

_Bias = Annotated[float, Field(ge=-100, le=100)]

LogitBias = Annotated[
    dict[int, _Bias],
    BeforeValidator(
        _with_token_ids,
        json_schema_input_type=Annotated[dict[str, _Bias], Field(max_length=_MAX_LOGIT_BIASES)],
    ),
]
