"""`/v1/models`: the models that can be asked."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """OpenAI's fields, two of vLLM's, and Anthropic's.

    `root` is what was loaded, and `max_model_len` is known once it was.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlx-batch-server"
    root: str
    max_model_len: int | None
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"


class ModelList(BaseModel):
    """All models on one page, as which Anthropic's clients read it."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
