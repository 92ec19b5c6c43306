"""A page of items."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel


class ItemList(BaseModel):
    """Items as JSON, with the ids of the first and the last one; empty ids if there is none."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[dict[str, Any]], *, has_more: bool) -> Self:
        return cls(
            data=list(items),
            first_id=items[0]["id"] if items else "",
            last_id=items[-1]["id"] if items else "",
            has_more=has_more,
        )
