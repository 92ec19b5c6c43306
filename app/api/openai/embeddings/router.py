"""`POST /v1/embeddings`."""

from functools import partial

from fastapi import APIRouter, Request, Response

from app.api.openai.embeddings.request import EmbeddingRequest
from app.api.openai.embeddings.response import EmbeddingList, embedding_list
from app.api.openai.response_builder import new_id
from app.api.pooling import begin_prompts, embeddings_of, input_reader, prompted
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import NUMBER_BYTES, admit, engine_for, prepared, respond_whole, written
from app.http.json_body import JsonRoute
from app.prompts.inputs import InputReader
from batching import Embeddings, InvalidRequest, PoolingParams, SequenceSpec

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Return a vector for each input."""
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        engine = await engine_for(request, body.model)
        model = engine.model
        embeddings = embeddings_of(model)
        params = _pooling(embeddings, body)
        truncation = body.cut(body.truncation_side)
        reader = input_reader(
            request, model, truncation, add_special_tokens=body.add_special_tokens
        )
        prompts = await prepared(request, partial(_prompts, reader, embeddings, body))
        salt = body.cache_salt or ""
        specs = [
            SequenceSpec(prompt=tuple(p), max_tokens=0, pooling=params, cache_salt=salt)
            for p in prompts
        ]
        task = await begin_prompts(request, engine, specs, admitted, completion_id=new_id("embd"))

    async def respond() -> bytes:
        outputs = await task.collect()
        task.close()
        vectors = [output.embedding for output in outputs if output.embedding is not None]
        as_base64 = body.encoding_format == "base64"
        write = partial(embedding_list, model.model_id, vectors, task.usage, as_base64=as_base64)
        num_bytes = NUMBER_BYTES * sum(map(len, vectors))
        return await written(request, lambda: write().model_dump_json(), num_bytes)

    return await respond_whole(task, respond)


def _pooling(embeddings: Embeddings, body: EmbeddingRequest) -> PoolingParams:
    if body.dimensions is not None and body.dimensions > embeddings.size:
        message = f"it must not be above {embeddings.size}, the size of this model's vectors"
        raise InvalidRequest("dimensions", message)
    normalize = embeddings.is_normalized if body.normalize is None else body.normalize
    return PoolingParams(type=embeddings.pooling, dimensions=body.dimensions, normalize=normalize)


def _prompts(
    reader: InputReader, embeddings: Embeddings, body: EmbeddingRequest
) -> list[list[int]]:
    inputs = [
        prompted(embeddings, body.prompt_name, each) if isinstance(each, str) else each
        for each in body.input
    ]
    return reader.read("input", inputs)
