"""Prompts to fill in, and the endpoints that make them."""

import json
from collections.abc import Sequence
from typing import Any, Final

import pytest

from app.api.models.cards import capabilities
from app.prompts.fill_in import ExtraFile, fill_in_prompt, fill_in_tokens
from batching import InvalidRequest, ModelInfo
from tests.support.speaker import END, MODEL_ID, Breaking, ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

QWEN: Final = (
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|repo_name|>",
    "<|file_sep|>",
)


class Marked(ByteTokenizer):
    """Has markers as tokens of their own, beyond the bytes."""

    def __init__(self, *markers: str) -> None:
        self.markers = {text: END + 1 + index for index, text in enumerate(markers)}
        self.num_tokens = END + 1 + len(markers)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.markers[text]] if text in self.markers else super().encode(text)

    def shown(self, token_ids: Sequence[int]) -> str:
        names = {token_id: text for text, token_id in self.markers.items()}
        return "".join(names.get(each) or chr(each) for each in token_ids)


def model(tokenizer: ByteTokenizer) -> ModelInfo:
    return ModelInfo(MODEL_ID, tokenizer, frozenset({END}), tokenizer.num_tokens, 2048)


@pytest.mark.parametrize(
    ("markers", "shown"),
    [
        (QWEN, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (("<PRE>", "<SUF>", "<MID>", "<EOT>"), "<PRE>a<SUF>b<MID>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<fim_prefix>a<fim_suffix>b<fim_middle>",
        ),
    ],
)
def test_each_family_has_its_order(markers: tuple[str, ...], shown: str) -> None:
    tokenizer = Marked(*markers)
    assert tokenizer.shown(fill_in_prompt(model(tokenizer), "suffix", "a", "b").token_ids) == shown


def test_models_tell_that_they_can() -> None:
    assert "insert" in capabilities(model(Marked(*QWEN)))
    assert "insert" not in capabilities(model(ByteTokenizer()))


def test_files_stand_before_the_prefix() -> None:
    tokenizer = Marked(*QWEN)
    made = fill_in_prompt(model(tokenizer), "suffix", "a", "b", [ExtraFile("f.py", "x")])
    assert tokenizer.shown(made.token_ids) == (
        "<|repo_name|>project\n<|file_sep|>f.py\nx\n<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    assert made.ends == (tokenizer.markers["<|file_sep|>"],)
    plain = Marked("<PRE>", "<SUF>", "<MID>")
    made = fill_in_prompt(model(plain), "suffix", "a", "b", [ExtraFile("f.py", "x")])
    assert plain.shown(made.token_ids) == "f.py\nx\n<PRE>a<SUF>b<MID>"


def test_a_model_without_markers_fills_nothing_in() -> None:
    assert fill_in_tokens(model(ByteTokenizer())) is None
    with pytest.raises(InvalidRequest) as refused:
        fill_in_prompt(model(ByteTokenizer()), "suffix", "a", "b")
    assert refused.value.param == "suffix"


ASKED: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "ab", "suffix": "cd"},
    "/api/generate": {"model": MODEL_ID, "prompt": "ab", "suffix": "cd", "stream": False},
    "/infill": {"input_prefix": "a", "prompt": "b", "input_suffix": "cd"},
}


async def fill(server: Served, path: str, **fields: Any) -> Any:
    return await server.post(path, ASKED[path] | fields)


@pytest.mark.parametrize("path", ASKED)
async def test_what_is_between_is_filled_in(path: str) -> None:
    tokenizer = Marked(*QWEN)
    end = tokenizer.markers["<|file_sep|>"]
    async with served([*b"xy", end, *b"never"], tokenizer=tokenizer) as server:
        answer = (await fill(server, path)).json()
    text = answer.get("content") or answer.get("response") or answer["choices"][0]["text"]
    assert text == "xy"
    used = answer.get("tokens_evaluated") or answer.get("prompt_eval_count")
    assert (used or answer["usage"]["prompt_tokens"]) == len("abcd") + 3


@pytest.mark.parametrize("path", ASKED)
async def test_a_model_that_cannot_says_so(path: str) -> None:
    async with served() as server:
        response = await fill(server, path)
    assert response.status_code == 400
    assert "suffix" in response.text and MODEL_ID in response.text


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"truncate_prompt_tokens": 3}, {"prompt": [1, 2]}]
)
async def test_a_suffix_needs_a_whole_text(fields: dict[str, Any]) -> None:
    async with served() as server:
        response = await fill(server, "/v1/completions", **fields)
    assert response.json()["error"]["param"] == "suffix"


async def test_an_editor_gets_the_fields_that_it_asks_for() -> None:
    """The request of llama.vim: what it warms the cache with, and what it asks then."""
    asked = {
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
    }
    names = ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "none"]
    async with served(b"xy", tokenizer=Marked(*QWEN)) as server:
        warmed = await fill(server, "/infill", **asked, n_predict=0, response_fields=[""])
        answer = await fill(server, "/infill", **asked, n_predict=9, response_fields=names)
    assert warmed.json() == {}
    found = answer.json()
    assert found.keys() == {*names} - {"none"}
    assert (found["content"], found["truncated"]) == ("xy", False)


async def test_an_infill_is_streamed() -> None:
    async with served(b"xyz", tokenizer=Marked(*QWEN)) as server:
        response = await fill(server, "/infill", stream=True, stop=["z"])
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line[:5] == "data:"]
    assert "".join(event["content"] for event in events) == "xy"
    assert [event["stop"] for event in events][-1] is True
    assert (events[-1]["stop_type"], events[-1]["stopping_word"]) == ("word", "z")


async def test_an_infill_that_fails_ends_with_the_error() -> None:
    async with served(b"xyz", tokenizer=Marked(*QWEN), runner=Breaking) as server:
        response = await fill(server, "/infill", stream=True)
    assert "error" in json.loads(response.text.strip().splitlines()[-1][6:])
