"""`POST /v1/rerank` and `/v1/score`, of a reranker and of a model that embeds."""

import math
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from app.prompts.templates.template_sandbox import SANDBOX
from batching import SandboxLost
from batching.pooling import Embeddings, NoEmbeddings, PoolingParams, PoolingType, Reranker
from batching.steps.sequences import SequenceState
from batching.steps.token_output import TokenLogprobs
from tests.support.fakes import expected_vector
from tests.support.speaker import END, MODEL_ID, ByteTokenizer, Served, Speaker, served

pytestmark = pytest.mark.anyio

YES, NO = ord("y"), ord("n")
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role[0] }}={{ turn.content }};"
    "{% if turn.content == 'bad' %}{{ raise_exception('it is bad') }}{% endif %}{% endfor %}T"
)
RERANKER = Reranker(relevant_id=YES, irrelevant_id=NO, template=TEMPLATE)
DOCUMENTS = ["ccc", "long text c", "cc"]
LAST = Embeddings(pooling=PoolingType.LAST, size=4)


class Judge(Speaker):
    """Finds a document the more relevant the more often it has a `c`."""

    def _named(self, sequence: SequenceState, prefix: list[int]) -> TokenLogprobs:
        return TokenLogprobs(-1.0, ((END, -1.0), (YES, -2.0), (NO, -2.0 - prefix.count(ord("c")))))


class Certain(Judge):
    """Is as certain as numbers can be."""

    def _named(self, sequence: SequenceState, prefix: list[int]) -> TokenLogprobs:
        return TokenLogprobs(-1.0, ((YES, -5000.0), (NO, -1.0)))


def relevance(document: str) -> float:
    return 1 / (1 + math.exp(-document.count("c")))


class Templated(ByteTokenizer):
    """Has a template of its own that is a function."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        assert not kwargs["tokenize"]
        if any(turn["content"] == "bad" for turn in conversation):
            raise ZeroDivisionError
        turns = [f"{turn['role'][0]}={turn['content']};" for turn in conversation]
        return "".join(turns) + "its own"


def reranking(
    reranker: Reranker = RERANKER, runner: type[Speaker] = Judge, **options: Any
) -> AbstractAsyncContextManager[Served]:
    return served(runner=runner, tokenizer=Templated(), reranker=reranker, **options)


async def rerank(server: Served, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    body = {"model": MODEL_ID, "query": "q", "documents": DOCUMENTS, **fields}
    return await server.post(path, body)


async def score(server: Served, path: str = "/v1/score", **fields: Any) -> httpx.Response:
    body = {"model": MODEL_ID, "text_1": "q", "text_2": DOCUMENTS, **fields}
    return await server.post(path, body)


def cosine(first: str, second: str) -> float:
    a, b = (expected_vector(text.encode(), PoolingParams()) for text in (first, second))
    return sum(x * y for x, y in zip(a, b, strict=True))


async def test_a_ranking_has_all_that_vllm_sends() -> None:
    async with reranking() as server:
        response = await rerank(server)
        assert await server.num_unfinished() == 0
    ranking = response.json()
    num_tokens = sum(len(f"q=q;d={document};T") for document in DOCUMENTS)
    assert ranking.pop("id").startswith("rerank-")
    assert ranking == {
        "model": MODEL_ID,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
        "results": [
            {
                "index": index,
                "document": {"text": DOCUMENTS[index]},
                "relevance_score": pytest.approx(relevance(DOCUMENTS[index])),
            }
            for index in (0, 2, 1)
        ],
    }


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
async def test_other_paths_and_forms_of_documents_are_the_same(path: str) -> None:
    objects = [{"text": document} for document in DOCUMENTS]
    async with reranking() as server:
        response = await rerank(server, path, documents=objects, return_documents=False, top_n=2)
    assert response.json()["results"] == [
        {"index": index, "relevance_score": pytest.approx(relevance(DOCUMENTS[index]))}
        for index in (0, 2)
    ]


async def test_equal_documents_keep_their_order_and_one_of_no_relevance_has_0() -> None:
    async with reranking(runner=Certain) as server:
        results = (await rerank(server, top_n=9)).json()["results"]
    assert [(each["index"], each["relevance_score"]) for each in results] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_are_in_the_order_of_the_request(path: str) -> None:
    async with reranking() as server:
        response = await score(server, path)
    answer = response.json()
    assert answer.pop("id").startswith("score-")
    assert answer.pop("created") > 0
    assert (answer["object"], answer["model"]) == ("list", MODEL_ID)
    assert answer["data"] == [
        {"index": i, "object": "score", "score": pytest.approx(relevance(document))}
        for i, document in enumerate(DOCUMENTS)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"text_1": ["c", "cc"], "text_2": ["a", "c"]},
        {"queries": ["c", "cc"], "documents": ["a", "c"]},
        {"data_1": ["c", "cc"], "data_2": ["a", "c"]},
    ],
)
async def test_as_many_texts_as_others_are_pairs(fields: dict[str, Any]) -> None:
    async with reranking() as server:
        response = await server.post("/v1/score", fields)
    scores = [each["score"] for each in response.json()["data"]]
    assert scores == pytest.approx([relevance("c"), relevance("ccc")])


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "q=q;d=abcdef;T"),
        ({"instruction": "find"}, "s=find;q=q;d=abcdef;T"),
        ({"max_tokens_per_doc": 2}, "q=q;d=ab;T"),
        ({"max_tokens_per_doc": 9}, "q=q;d=abcdef;T"),
        ({"truncate_prompt_tokens": 11}, "q=q;d=abc;T"),
        ({"truncate_prompt_tokens": -1}, "q=q;d=abcdef;T"),
        # No more than the document is cut.
        ({"truncate_prompt_tokens": 3}, "q=q;d=;T"),
    ],
)
async def test_a_long_document_loses_its_end(fields: dict[str, Any], prompt: str) -> None:
    async with reranking() as server:
        response = await rerank(server, documents=["abcdef"], **fields)
    assert response.json()["usage"]["prompt_tokens"] == len(prompt)


async def test_a_document_that_does_not_fit_is_cut_if_the_request_says_so() -> None:
    async with reranking() as server:
        long = await rerank(server, documents=["a", "b" * 3000])
        cut = await rerank(server, documents=["b" * 3000], truncate_prompt_tokens=-1)
    assert long.json()["error"]["param"] == "documents.1"
    assert "maximum context length is 2047 tokens" in long.json()["error"]["message"]
    # One more token is sampled.
    assert cut.json()["usage"]["prompt_tokens"] == 2047


async def test_a_models_own_template_is_taken_without_another() -> None:
    async with reranking(Reranker(relevant_id=YES, irrelevant_id=NO)) as server:
        response = await rerank(server, documents=["a"])
        bad = await rerank(server, query="bad")
    assert response.json()["usage"]["prompt_tokens"] == len("q=q;d=a;its own")
    assert "fails with this request (ZeroDivisionError)" in bad.json()["error"]["message"]


async def test_a_renderer_that_was_killed_is_not_the_querys_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> str:
        raise SandboxLost

    monkeypatch.setattr(SANDBOX, "ask", fail)
    async with reranking() as server:
        response = await rerank(server, documents=["a"])
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"documents": []}, "documents", "at least 1 item"),
        ({"documents": ["a"] * 2049}, "documents", "at most 2048 items"),
        ({"documents": ["a", 1]}, "documents.1", ""),
        ({"query": "\ud800"}, "query", "surrogate"),
        (
            {"query": "bad"},
            "query",
            "the reranker's template fails with this request (TemplateError)",
        ),
        ({"documents": ["a" * 2000] * 3}, "documents", "together may have at most 4096 tokens"),
        ({"top_n": -1}, "top_n", "greater than or equal to 0"),
        ({"use_activation": False}, "use_activation", ""),
    ],
)
async def test_other_rankings_are_rejected(
    fields: dict[str, Any], param: str, message: str
) -> None:
    async with reranking(max_queued_tokens=4096) as server:
        response = await rerank(server, **fields)
        assert await server.num_unfinished() == 0
    assert response.status_code == 400
    assert (response.json()["error"]["param"] or "").startswith(param)
    assert message in response.json()["error"]["message"]


async def test_other_pairs_are_rejected() -> None:
    async with reranking() as server:
        response = await score(server, text_1=["a", "b"])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "text_1"


async def test_a_model_that_embeds_compares_vectors() -> None:
    async with served(embeddings=LAST) as server:
        response = await score(server, text_1="b", text_2=["a", "b", "a"])
        ranking = (await rerank(server, query="b", documents=["a", "b"])).json()["results"]
    scores = [each["score"] for each in response.json()["data"]]
    assert scores == pytest.approx([cosine("b", "a"), 1, cosine("b", "a")])
    # Equal texts are embedded once.
    assert response.json()["usage"]["prompt_tokens"] == 3
    assert [each["index"] for each in ranking] == [1, 0]


async def test_prompts_stand_before_queries_and_documents() -> None:
    prompts = {"query": "Q:", "document": "D:"}
    embeddings = Embeddings(pooling=PoolingType.LAST, size=4, prompts=prompts)
    async with served(embeddings=embeddings) as server:
        results = (await rerank(server, query="b", documents=["a"])).json()["results"]
        scores = (await score(server, text_1="b", text_2="a")).json()["data"]
    assert results[0]["relevance_score"] == pytest.approx(cosine("Q:b", "D:a"))
    assert scores[0]["score"] == pytest.approx(cosine("b", "a"))


@pytest.mark.parametrize("name", ["instruction", "max_tokens_per_doc"])
async def test_what_only_a_reranker_can_do_is_rejected(name: str) -> None:
    fields: dict[str, Any] = {"instruction": "find", "max_tokens_per_doc": 1}
    async with served(embeddings=LAST) as server:
        response = await rerank(server, **{name: fields[name]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_a_model_that_does_neither_says_so() -> None:
    none = NoEmbeddings("is not described as an embedding model", is_described=False)
    async with served(embeddings=none) as server:
        response = await rerank(server)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "model")
    assert f"the model '{MODEL_ID}' is no reranker, and is not described" in error["message"]
    assert "MLX_SERVER_RERANK_TEMPLATE" in error["message"]
