"""Vectors are those of sentence-transformers in float32, and a reranker's scores those of transformers.

The golden file is written by scripts/references/embedding.py.
"""

from pathlib import Path
from typing import Any

import pytest

from batching.config import NativeMode
from tests.support.embedding_models import (
    EMBEDDERS,
    INSTRUCTION,
    QUERY,
    RERANK_TEMPLATE,
    TEXTS,
)
from tests.support.embedding_server import GOLDEN, serving, write_embedder, write_reranker

pytestmark = pytest.mark.anyio

NATIVE = pytest.mark.parametrize("native", ["auto", "off"])


@NATIVE
@pytest.mark.parametrize("name", EMBEDDERS)
async def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, name: str, native: NativeMode
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "vectors": {},
        "queries": {"prompt_name": "query"},
        "cut": {"dimensions": 6},
    }
    async with serving(write_embedder(tmp_path, name), native=native, prefill_chunk=16) as client:
        for kind, fields in kinds.items():
            if kind == "cut" and EMBEDDERS[name].is_normalized:
                # sentence-transformers does not normalize what it has cut.
                continue
            body = {"input": TEXTS, **fields}
            response = await client.post("/v1/embeddings", json=body)
            vectors = [each["embedding"] for each in response.json()["data"]]
            for vector, golden in zip(vectors, GOLDEN[name][kind], strict=True):
                assert vector == pytest.approx(golden, abs=1e-4)


@NATIVE
async def test_scores_are_those_of_transformers(tmp_path: Path, native: NativeMode) -> None:
    body = {"query": QUERY, "documents": TEXTS, "instruction": INSTRUCTION}
    async with serving(
        write_reranker(tmp_path), native=native, rerank_template=RERANK_TEMPLATE
    ) as client:
        response = await client.post("/v1/rerank", json=body)
    found = {each["index"]: each["relevance_score"] for each in response.json()["results"]}
    assert [found[index] for index in range(len(TEXTS))] == pytest.approx(
        GOLDEN["reranker"]["scores"], abs=1e-4
    )
