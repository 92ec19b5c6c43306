"""`/v1/embeddings`: the response."""

import base64
import struct
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel

from app.observability.request_record import TokenUsage
from batching import Vector


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> Self:
        return cls(prompt_tokens=usage.num_prompt_tokens, total_tokens=usage.num_prompt_tokens)


class Embedding(BaseModel):
    """`embedding` is base64 of 32-bit floats, little-endian, if that is requested."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def embedding_list(
    model_id: str, vectors: Sequence[Vector], usage: TokenUsage, *, as_base64: bool
) -> EmbeddingList:
    encode = _base64 if as_base64 else list
    return EmbeddingList(
        data=[Embedding(index=i, embedding=encode(vector)) for i, vector in enumerate(vectors)],
        model=model_id,
        usage=EmbeddingUsage.of(usage),
    )


def _base64(vector: Vector) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
