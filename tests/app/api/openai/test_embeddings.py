"""`POST /v1/embeddings`."""

import base64
import struct
from typing import Any

import httpx
import httpx2
import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from batching.pooling import Embeddings, NoEmbeddings, PoolingParams, PoolingType
from tests.support.fakes import expected_vector
from tests.support.rows import rows
from tests.support.sdk_types import check_shape
from tests.support.speaker import END, MODEL_ID, ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

LAST = Embeddings(pooling=PoolingType.LAST, size=4)
PARAMS = PoolingParams()


async def embed(server: Served, text: Any = "Hi", **fields: Any) -> httpx.Response:
    return await server.post("/v1/embeddings", {"model": MODEL_ID, "input": text, **fields})


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [each["embedding"] for each in response.json()["data"]]


async def test_a_response_has_all_that_openai_sends() -> None:
    async with served(embeddings=LAST) as server:
        response = await embed(server, "Hi", user="me")
    check_shape(response.json(), CreateEmbeddingResponse)
    assert response.json() == {
        "object": "list",
        "model": MODEL_ID,
        "data": [
            {"object": "embedding", "index": 0, "embedding": expected_vector(b"Hi", PARAMS)},
        ],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }


@pytest.mark.parametrize("value", ["Hi", ["Hi"], [72, 105], [[72, 105]]])
async def test_an_input_is_text_or_tokens(value: Any) -> None:
    async with served(embeddings=LAST) as server:
        response = await embed(server, value)
    assert vectors(response) == [expected_vector(b"Hi", PARAMS)]


async def test_many_inputs_keep_their_order() -> None:
    texts = [f"text {i} {'x' * (i % 5)}" for i in range(40)]
    async with served(embeddings=LAST) as server:
        response = await embed(server, [*texts, "text 1 x"])
        assert await server.num_unfinished() == 0
    found = vectors(response)
    assert found[:40] == [expected_vector(text.encode(), PARAMS) for text in texts]
    assert found[40] == found[1]
    assert [each["index"] for each in response.json()["data"]] == list(range(41))


async def test_base64_is_of_32_bit_floats() -> None:
    async with served(embeddings=LAST) as server:
        (text,) = vectors(await embed(server, encoding_format="base64"))
    assert list(struct.unpack("<4f", base64.b64decode(str(text)))) == expected_vector(b"Hi", PARAMS)


async def test_openais_sdk_reads_vectors() -> None:
    async with served(embeddings=LAST) as server:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
        client = openai.AsyncOpenAI(
            api_key="-", base_url="http://localhost/v1", http_client=http, max_retries=0
        )
        plain = await client.embeddings.create(model=MODEL_ID, input="Hi", dimensions=2)
        several = await client.embeddings.create(
            model=MODEL_ID, input=["Hi", "Ho"], encoding_format="float"
        )
    params = PoolingParams(dimensions=2)
    assert plain.data[0].embedding == pytest.approx(expected_vector(b"Hi", params), abs=1e-6)
    assert several.data[1].embedding == expected_vector(b"Ho", PARAMS)
    assert several.usage.prompt_tokens == 4


@pytest.mark.parametrize("dimensions", [1, 3, 4, None])
@pytest.mark.parametrize("pooling", PoolingType)
async def test_the_first_dimensions_are_normalized_again(
    pooling: PoolingType, dimensions: int | None
) -> None:
    async with served(embeddings=Embeddings(pooling=pooling, size=4)) as server:
        (vector,) = vectors(await embed(server, dimensions=dimensions))
    assert vector == expected_vector(b"Hi", PoolingParams(type=pooling, dimensions=dimensions))
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@rows(("is_normalized", "asked"), [(True, False), (False, None), (False, True)])
async def test_the_model_says_whether_vectors_are_normalized_unless_the_request_does(
    is_normalized: bool, asked: bool | None
) -> None:
    embeddings = Embeddings(pooling=PoolingType.MEAN, size=4, is_normalized=is_normalized)
    async with served(embeddings=embeddings) as server:
        (vector,) = vectors(await embed(server, normalize=asked))
    normalize = is_normalized if asked is None else asked
    assert vector == expected_vector(
        b"Hi", PoolingParams(type=PoolingType.MEAN, normalize=normalize)
    )


async def test_a_models_prompts_stand_before_texts_only() -> None:
    embeddings = Embeddings(
        pooling=PoolingType.LAST, size=4, prompts={"query": "Q:", "doc": "D:"}, default_prompt="doc"
    )
    async with served(embeddings=embeddings) as server:
        named = vectors(await embed(server, ["Hi", "Ho"], prompt_name="query"))
        default = vectors(await embed(server, "Hi"))
        tokens = vectors(await embed(server, [72, 105]))
        unknown = await embed(server, prompt_name="title")
    assert named == [expected_vector(text, PARAMS) for text in (b"Q:Hi", b"Q:Ho")]
    assert default == [expected_vector(b"D:Hi", PARAMS)]
    assert tokens == [expected_vector(b"Hi", PARAMS)]
    assert unknown.status_code == 400
    assert unknown.json()["error"]["param"] == "prompt_name"
    assert "the model's prompts are: doc, query" in unknown.json()["error"]["message"]


async def test_one_model_serves_chat_and_embeddings() -> None:
    embeddings = Embeddings(pooling=PoolingType.LAST, size=4, prompts={"query": "Q:"})
    async with served(embeddings=embeddings) as server:
        said = await server.chat("Hi")
        (vector,) = vectors(await embed(server))
        again = await server.chat("Hi")
    assert vector == expected_vector(b"Hi", PARAMS)
    for response in (said, again):
        assert response.json()["choices"][0]["message"]["content"] == "Hello!"


class Framing(ByteTokenizer):
    """Writes a token of its own before and after a text, and has a vocabulary."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        end = [END] * add_special_tokens
        return [*end, *super().encode(text), *end]

    def get_vocab(self) -> list[str]:
        return ["ab", "c"]


@rows(
    ("text", "fields", "kept"),
    [
        ("abcdef", {}, [END, *b"abcdef", END]),
        ("abcdef", {"add_special_tokens": False}, b"abcdef"),
        ("abcdef", {"truncate_prompt_tokens": 8}, [END, *b"abcdef", END]),
        ("abcdef", {"truncate_prompt_tokens": 5}, [END, *b"abc", END]),
        ("abcdef", {"truncate_prompt_tokens": 5, "truncation_side": "left"}, [END, *b"def", END]),
        ("abcdef", {"truncate_prompt_tokens": 2}, [END, END]),
        ("abcdef", {"truncate_prompt_tokens": 1}, [END]),
        ([1, 2, 3, 4], {"truncate_prompt_tokens": 3}, [1, 2, 3]),
        ([1, 2, 3, 4], {"truncate_prompt_tokens": 3, "truncation_side": "left"}, [2, 3, 4]),
        ("ab" * 500, {"truncate_prompt_tokens": -1}, [END, *b"ab" * 9, END]),
        ([7] * 30, {"truncate_prompt_tokens": -1}, [7] * 20),
    ],
)
async def test_what_is_cut_is_the_text_and_not_what_is_around_it(
    text: Any, fields: dict[str, Any], kept: Any
) -> None:
    embeddings = Embeddings(pooling=PoolingType.LAST, size=4, max_tokens=20)
    async with served(tokenizer=Framing(), embeddings=embeddings) as server:
        response = await embed(server, text, **fields)
    assert vectors(response) == [expected_vector([*kept], PARAMS)]
    assert response.json()["usage"]["prompt_tokens"] == len(kept)


class Joining(ByteTokenizer):
    """Makes other tokens of a text between special ones: these cannot be told apart."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text) if add_special_tokens else [1, *super().encode(text)]


async def test_special_tokens_that_cannot_be_told_apart_are_cut_as_the_text() -> None:
    async with served(tokenizer=Joining(), embeddings=LAST) as server:
        response = await embed(server, "abcdef", truncate_prompt_tokens=4)
    assert vectors(response) == [expected_vector([1, *b"abc"], PARAMS)]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"text": ["a"] * 2049}, "input", "it has 2049 items, and 2048 are the most"),
        ({"text": ""}, "input", "it has no tokens; at least one is needed"),
        ({"text": []}, "input", "it has no tokens; at least one is needed"),
        ({"text": ["a", "", "b"]}, "input.1", "it has no tokens; at least one is needed"),
        ({"text": [[1], [END + 1]]}, "input.1", f"token id {END + 1} is not in [0, {END + 1})"),
        ({"text": [1.5]}, "input", "it must be a text or a list of token ids"),
        ({"text": None}, "input", "Field required"),
        ({"text": "\ud800"}, "input", "it contains half of a surrogate pair, which is no text"),
        (
            {"text": ["a", "b" * 2049]},
            "input.1",
            "maximum context length is 2048 tokens. However, input.1 has 2049.",
        ),
        ({"text": ["b" * 2000] * 3}, "input", "together may have at most 4096 tokens"),
        ({"dimensions": 5}, "dimensions", "it must not be above 4"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "it must not be 0"),
        ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens", "it must not be above 2048"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages", ""),
        ({"use_activation": False}, "use_activation", ""),
    ],
)
async def test_other_requests_are_rejected(
    fields: dict[str, Any], param: str, message: str
) -> None:
    async with served(embeddings=LAST, max_queued_tokens=4096) as server:
        response = await embed(server, **{"text": "Hi"} | fields)
        assert await server.num_unfinished() == 0
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert message in error["message"]


async def test_a_long_text_is_rejected_by_its_length_alone() -> None:
    class Untouched(Framing):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("it takes seconds")

    async with served(tokenizer=Untouched(), embeddings=LAST) as server:
        response = await embed(server, "a" * 5000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "However, input has 2500" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (None, "MLX_SERVER_POOLING=last"),
        (NoEmbeddings("is a reranker, and makes no embeddings"), "is a reranker"),
    ],
)
async def test_a_model_that_does_not_embed_says_what_would(
    embeddings: NoEmbeddings | None, message: str
) -> None:
    options: dict[str, Any] = {} if embeddings is None else {"embeddings": embeddings}
    async with served(**options) as server:
        response = await embed(server)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert f"the model '{MODEL_ID}' is" in response.json()["error"]["message"]
    assert message in response.json()["error"]["message"]


async def test_requests_are_counted_with_their_tokens() -> None:
    async with served(embeddings=LAST) as server:
        await embed(server, ["Hi", "you"])
        page = (await server.client.get("/metrics")).text
    counted = {line.split("{")[0]: line.rpartition(" ")[2] for line in page.splitlines()}
    assert counted["vllm:prompt_tokens_total"] == "5.0"
    assert counted["vllm:generation_tokens_total"] == "0.0"
