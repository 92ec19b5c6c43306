"""`POST /v1/responses/compact`: the response."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel

from app.api.openai.responses.items.input_items import InputItem, MessageItem, new_item_id
from app.api.openai.responses.items.output_items import ResponseObject, ResponseUsage
from batching import RequestFailed


class CompactedResponse(BaseModel):
    """`output` stands for the input that was compacted: what the user has said, and one item of the type `compaction`."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


def compacted(items: Iterable[InputItem], response: ResponseObject) -> CompactedResponse:
    """Return what the items become by the response that has their summary.

    Raises:
        RequestFailed: it has none.
    """
    if response.error is not None:
        raise RequestFailed(response.error.message)
    assert response.usage is not None, "it is complete"
    said = [item for item in items if isinstance(item, MessageItem) and item.role == "user"]
    return CompactedResponse(
        id=new_item_id("resp"),
        object="response.compaction",
        created_at=response.created_at,
        output=[
            *(item.to_stored() for item in said),
            *(item.model_dump(exclude_unset=True) for item in response.output),
        ],
        usage=response.usage,
    )
