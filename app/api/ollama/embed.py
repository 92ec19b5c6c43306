"""`POST /api/embed`, and its older form `/api/embeddings`."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import Request, Response
from pydantic import BaseModel, BeforeValidator, Field

from app.api.ollama.fields import KeepAlive
from app.api.ollama.names import known_name
from app.api.ollama.route import new_router
from app.api.ollama.router import kept
from app.api.openai.response_builder import new_id
from app.api.pooling import begin_prompts, embeddings_of, input_reader, prompted
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import INT32_MAX, Text, as_list
from app.api.serving import NUMBER_BYTES, admit, engine_for, prepared, respond_whole, written
from app.prompts.render import Truncation
from app.server_state import server_state
from batching import InvalidRequest, PoolingParams, Priority, SequenceSpec, Vector

router = new_router()

_Texts = Annotated[list[Text], Field(min_length=1, max_length=2048)]


class Embedding(BaseModel):
    """Of `/api/embeddings`."""

    embedding: list[float]


class Embeddings(BaseModel):
    """Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbedBase(RequestModel):
    model: Text = Field(min_length=1)
    keep_alive: KeepAlive = None


class EmbedRequest(EmbedBase):
    input: Annotated[_Texts, BeforeValidator(as_list, json_schema_input_type=str | _Texts)]
    truncate: bool = Field(default=True, description="Cut the end of a text that is too long.")
    dimensions: int | None = Field(default=None, ge=1, le=INT32_MAX)


class EmbeddingsRequest(EmbedBase):
    prompt: Text


@router.post("/api/embed", response_model=Embeddings)
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Return a vector of length 1 for each text."""
    return await _respond(
        request, body, "input", body.input, truncate=body.truncate, dimensions=body.dimensions
    )


@router.post("/api/embeddings", response_model=Embedding)
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    """Return the vector of one text."""
    return await _respond(request, body, "prompt", [body.prompt])


async def _respond(
    request: Request,
    body: EmbedBase,
    param: str,
    texts: Sequence[str],
    *,
    truncate: bool = True,
    dimensions: int | None = None,
) -> Response:
    async with admit(request, priority=Priority.NORMAL, time_limit=None) as admitted:
        name = known_name(server_state(request).manager, body.model)
        engine = await engine_for(request, name, keep_alive=kept(request, body.keep_alive))
        load_time = admitted.deadline.elapsed()
        found = embeddings_of(engine.model)
        if dimensions is not None and dimensions > found.size:
            message = f"it must not be above {found.size}, the size of this model's vectors"
            raise InvalidRequest("dimensions", message)
        cut = Truncation(None, 0, "right") if truncate else None
        reader = input_reader(request, engine.model, cut)
        inputs = [prompted(found, None, text) for text in texts]
        prompts = await prepared(request, partial(reader.read, param, inputs))
        pooling = PoolingParams(type=found.pooling, dimensions=dimensions, normalize=True)
        specs = [SequenceSpec(prompt=tuple(p), max_tokens=0, pooling=pooling) for p in prompts]
        task = await begin_prompts(request, engine, specs, admitted, completion_id=new_id("embd"))

    def write(vectors: Sequence[Vector]) -> str:
        if param == "prompt":
            return Embedding(embedding=list(vectors[0])).model_dump_json()
        return Embeddings(
            model=body.model,
            embeddings=[list(vector) for vector in vectors],
            total_duration=round(admitted.deadline.elapsed() * 1e9),
            load_duration=round(load_time * 1e9),
            prompt_eval_count=task.usage.num_prompt_tokens,
        ).model_dump_json()

    async def respond() -> bytes:
        outputs = await task.collect()
        task.close()
        vectors = [output.embedding for output in outputs if output.embedding is not None]
        return await written(
            request, partial(write, vectors), NUMBER_BYTES * sum(map(len, vectors))
        )

    return await respond_whole(task, respond)
