"""Encoders over HTTP: vectors of sentence-transformers, scores of transformers, and what is refused.

The golden file is written by scripts/references/encoder.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.embedding_server import serving
from tests.support.encoder_files import GOLDEN, write_cross_encoder, write_encoder
from tests.support.encoder_models import CONFIGS, QUERY, TEXTS

pytestmark = pytest.mark.anyio

NATIVE = pytest.mark.parametrize("native", ["auto", "off"])


@NATIVE
@pytest.mark.parametrize("kind", CONFIGS)
async def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, kind: str, native: str
) -> None:
    async with serving(write_encoder(tmp_path, kind), native=native) as client:
        together = await client.post("/v1/embeddings", json={"input": TEXTS})
        alone = [await client.post("/v1/embeddings", json={"input": text}) for text in TEXTS]
    vectors = [each["embedding"] for each in together.json()["data"]]
    for vector, golden, response in zip(
        vectors, GOLDEN[kind]["embedder"]["vectors"], alone, strict=True
    ):
        assert vector == pytest.approx(golden, abs=1e-5)
        assert vector == pytest.approx(response.json()["data"][0]["embedding"], abs=1e-6)


@NATIVE
@pytest.mark.parametrize("kind", CONFIGS)
async def test_scores_are_those_of_transformers(tmp_path: Path, kind: str, native: str) -> None:
    async with serving(write_cross_encoder(tmp_path, kind), native=native) as client:
        scored = await client.post("/v1/score", json={"text_1": QUERY, "text_2": TEXTS})
        ranked = await client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS})
    golden = GOLDEN[kind]["cross_encoder"]["scores"]
    assert [each["score"] for each in scored.json()["data"]] == pytest.approx(golden, abs=1e-5)
    order = sorted(range(len(TEXTS)), key=lambda index: -golden[index])
    assert [each["index"] for each in ranked.json()["results"]] == order


async def score(client: Any, document: str, **fields: Any) -> tuple[float, int]:
    """Return the score of a document, and how many tokens the pair has."""
    body = {"text_1": QUERY, "text_2": document, **fields}
    answer = (await client.post("/v1/score", json=body)).json()
    return answer["data"][0]["score"], answer["usage"]["prompt_tokens"]


async def test_a_long_document_loses_its_end(tmp_path: Path) -> None:
    words = [str(i % 87) for i in range(200)]
    # Three words of the query, and three tokens around both texts.
    room = 96 - 6
    async with serving(write_cross_encoder(tmp_path, "bert")) as client:
        short, num_tokens = await score(client, " ".join(words[:4]))
        assert num_tokens == 10
        body = " ".join(words)
        assert await score(client, body, max_tokens_per_doc=4, truncate_prompt_tokens=-1) == (
            short,
            10,
        )
        assert await score(client, body, truncate_prompt_tokens=10) == (short, 10)
        whole, num_tokens = await score(client, body, truncate_prompt_tokens=-1)
        assert num_tokens == 96
        assert await score(client, " ".join(words[:room])) == (whole, 96)
        # No more than the document is cut.
        assert (await score(client, body, truncate_prompt_tokens=2))[1] == 6
        refused = await client.post("/v1/rerank", json={"query": QUERY, "documents": ["1", body]})
        no_room = await client.post("/v1/rerank", json={"query": "1" * 9000, "documents": ["1"]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "documents.1")
    assert "context length is 96 tokens" in error["message"]
    assert (no_room.status_code, no_room.json()["error"]["param"]) == (400, "query")


async def test_an_encoder_writes_no_text(tmp_path: Path) -> None:
    async with serving(write_encoder(tmp_path, "bert")) as client:
        requests: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}]},
            "/v1/completions": {"prompt": "1"},
            "/v1/responses": {"input": "1"},
            "/v1/messages": {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1},
        }
        for path, fields in requests.items():
            response = await client.post(path, json={"model": "tiny", **fields})
            assert response.status_code == 400
            assert "is an encoder, which writes no text" in response.text
        long = await client.post("/v1/embeddings", json={"input": "1 " * 95})
        card = (await client.get("/v1/models/tiny")).json()
    assert card["capabilities"] == ["embedding"]
    assert (card["max_model_len"], card["memory"]["kv_cache"]) == (96, 0)
    assert "context length is 96 tokens. However, input has 97" in long.json()["error"]["message"]


async def test_a_cross_encoder_makes_no_vectors_and_takes_no_instruction(tmp_path: Path) -> None:
    async with serving(write_cross_encoder(tmp_path, "modernbert")) as client:
        vectors = await client.post("/v1/embeddings", json={"input": "1"})
        body = {"query": "1", "documents": ["1"], "instruction": "2"}
        asked = await client.post("/v1/rerank", json=body)
        card = (await client.get("/v1/models/tiny")).json()
    assert card["capabilities"] == ["rerank"]
    assert "is a cross-encoder, and makes no embeddings" in vectors.json()["error"]["message"]
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "instruction")
