"""Holds responses to the types of a client's package: nothing unknown, nothing missing."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

from tests.support.published_fields import REQUIRED, UNKNOWN_TO_SDK


def faults(value: Any) -> Iterator[str]:
    """Yield each field that the client's types do not know, and each that the API has always and is not there."""
    if isinstance(value, list):
        for each in value:
            yield from faults(each)
    elif isinstance(value, BaseModel):
        kind = type(value)
        for name in set(value.model_extra or {}) - UNKNOWN_TO_SDK.get(kind, set()):
            yield f"{kind.__name__}.{name} is unknown"
        for name in set(REQUIRED.get(kind, "").split()) - value.model_fields_set:
            yield f"{kind.__name__}.{name} is missing"
        for _, each in value:
            yield from faults(each)


def check_shape(raw: Any, kind: Any) -> Any:
    """Validate strictly what the client itself only constructs."""
    value = _validator_of(kind).validate_json(json.dumps(raw), strict=True)
    found = sorted(faults(value))
    assert not found, found
    return value


@cache
def _validator_of(kind: Any) -> TypeAdapter[Any]:
    """Return what takes a tenth of a second to make for a union of all events."""
    return TypeAdapter(kind)
