"""`/v1/models`: the models that can be asked."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlx-batch-server"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
