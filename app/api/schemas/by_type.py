"""Objects whose field `type` says of which kind they are."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from app.api.schemas.fields import field_error

Parsed = TypeVar("Parsed")


def by_type(kinds: Mapping[str, Callable[[Any], Parsed]]) -> Callable[[Any], Parsed]:
    """Return a parser of objects that chooses the kind by the field `type`.

    A union of pydantic's would write the name of the kind into the field of each error.
    """

    def parse(data: Any) -> Parsed:
        if not isinstance(data, dict) or not isinstance(kind := data.get("type"), str):
            raise field_error("it must be an object with a type")
        if kind not in kinds:
            raise field_error(f"the type {kind[:40]!r} is not supported", "type")
        return kinds[kind](data)

    return parse
