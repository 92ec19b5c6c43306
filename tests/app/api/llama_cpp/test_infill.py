"""`/infill`, as editors ask it: over a real socket, with what they send unless they are told otherwise."""

import json
from typing import Any, Final

import httpx
import pytest
from pydantic import AliasChoices, BaseModel

from app.api.llama_cpp.line_limits import LineLimits
from app.api.llama_cpp.request import InfillRequest
from app.api.openai.completions.request import CompletionRequest
from app.parsing.events import ContentPiece
from batching import NOT_RETAINED, NOT_STORED
from tests.support.fill_in import QWEN, Marked
from tests.support.raw_http import running
from tests.support.speaker import Breaking, Served, served, speaking_app, speaking_manager

pytestmark = pytest.mark.anyio

TIMINGS: Final = [
    f"timings/{part}_{name}"
    for part in ("prompt", "predicted")
    for name in ("n", "ms", "per_token_ms", "per_second")
]
CHUNKS: Final = [{"text": "x = 1\n", "time": [1764000000, 5], "filename": "a.py"}]
CONTEXT: Final[dict[str, Any]] = {
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n    return b\n",
    "input_extra": CHUNKS,
    "prompt": "    b =",
}
# llama.vim: before a completion, and to have its chunks read beforehand.
VIM: Final[dict[str, Any]] = CONTEXT | {
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", *TIMINGS, "truncated", "tokens_cached"],
}
VIM_AHEAD: Final[dict[str, Any]] = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": CHUNKS,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "stream": False,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
# llama.vscode, likewise.
CODE: Final = {
    name: value for name, value in VIM.items() if name not in ("stop", "response_fields")
}
CODE_AHEAD: Final[dict[str, Any]] = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": CHUNKS,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}


async def test_the_requests_of_editors_are_answered() -> None:
    manager = speaking_manager(b" a + 1", tokenizer=Marked(*QWEN))
    with speaking_app(manager) as app, running(app) as site:
        host, port = site.address
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            asked = [VIM_AHEAD, VIM, CODE_AHEAD, CODE]
            responses = [await client.post("/infill", json=body) for body in asked]
    ahead, vim, code_ahead, code = [response.json() for response in responses]
    assert ahead == {}
    assert vim.keys() == {*VIM["response_fields"]}
    assert (vim["content"], vim["truncated"]) == (" a + 1", False)
    assert vim["timings/predicted_n"] == len(" a + 1") + 1
    assert (code_ahead["content"], code_ahead["tokens_evaluated"] > 0) == ("", True)
    assert (code["content"], code["stop_type"]) == (" a + 1", "eos")
    assert code["timings"]["prompt_n"] > 0


def test_sampling_is_what_editors_ask_for() -> None:
    params = InfillRequest.model_validate(VIM).params()
    # Samplers that are not listed are off.
    assert (params.top_k, params.top_p, params.temperature, params.min_p) == (40, 0.99, 0.0, 0.0)
    assert params.cache_salt is None
    fields = {"temperature": 0.2, "dry_multiplier": 0.5, "seed": -1, "cache_prompt": False}
    params = InfillRequest.model_validate(CONTEXT | fields).params()
    assert (params.temperature, params.seed) == (0.2, None)
    assert params.dry is not None
    assert (params.cache_salt is None, params.retention) == (False, NOT_STORED)
    params = InfillRequest.model_validate(CONTEXT | {"cache_salt": "a"}).params()
    assert (params.cache_salt, params.retention) == ("a", NOT_RETAINED)


REFUSED: Final[dict[str, Any]] = {
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "object"},
    "lora": [{"id": 0, "scale": 0.5}],
    "max_tokens": 127,
    "min_new_tokens": 1,
    "mirostat": 1,
    "n": 2,
    "n_indent": -1,
    "n_probs": 3,
    "samplers": ["top_p", "top_k", "infill"],
    "t_max_predict_ms": 0.5,
    "timeout": -1,
}


async def test_what_would_change_the_output_is_refused_by_name() -> None:
    async with served(tokenizer=Marked(*QWEN)) as server:
        for name, value in REFUSED.items():
            response = await server.post("/infill", VIM | {name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


# They do nothing alone, or what they ask for is always there.
WITHOUT_EFFECT: Final = {
    "return_timings",
    "return_tokens_as_token_ids",
    "stream_options",
    "truncation_side",
}


def test_a_field_of_completions_has_its_effect_or_is_refused() -> None:
    known = names_of(InfillRequest) | InfillRequest.defaults.keys() | WITHOUT_EFFECT
    assert names_of(CompletionRequest) - known == set()


def names_of(request: type[BaseModel]) -> set[str]:
    names: set[str] = set()
    for name, field in request.model_fields.items():
        others = field.validation_alias
        names |= (
            {str(other) for other in others.choices} if isinstance(others, AliasChoices) else {name}
        )
    return names


@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_completion_tokens"])
async def test_the_limit_has_other_names(name: str) -> None:
    async with served(b"y" * 9, tokenizer=Marked(*QWEN)) as server:
        answers = [await infill(server, **{name: limit}) for limit in (2, 0, -1)]
    assert [answer["content"] for answer in answers] == ["yy", "", "y" * 9]


async def test_a_long_file_is_cut_as_far_as_there_is_room() -> None:
    file = {"text": "x" * 50}
    async with served(b"y", tokenizer=Marked(*QWEN), num_blocks=16) as server:
        fits = await infill(server, input_prefix="a" * 100, input_extra=[file])
        cut = await infill(server, input_prefix="a" * 9000, input_suffix="b" * 9000, n_predict=12)
        warm = await infill(server, input_extra=[file] * 50, n_predict=0)
    assert (fits["content"], fits["truncated"]) == ("y", False)
    context = 16 * 32
    assert (cut["content"], cut["truncated"], cut["tokens_evaluated"]) == ("y", True, context - 12)
    assert warm["truncated"] and context - 80 < warm["tokens_evaluated"] < context


@pytest.mark.parametrize("n_predict", [-1, 511, 512, 100_000])
async def test_output_gives_way_to_texts_of_up_to_half_the_context(n_predict: int) -> None:
    async with served(b"y" * 600, tokenizer=Marked(*QWEN), num_blocks=16) as server:
        answer = await infill(server, input_prefix="a" * 100, n_predict=n_predict)
    num_texts = answer["tokens_evaluated"]
    assert (answer["truncated"], 100 < num_texts < 256) == (False, True)
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", 512 - num_texts)


async def infill(server: Served, **fields: Any) -> Any:
    return (await server.post("/infill", CONTEXT | fields)).json()


@pytest.mark.parametrize(
    ("indent", "text"),
    [(0, " 1\n\tx\n  y"), (1, " 1\n\tx\n  y"), (2, " 1\n\t"), (3, " 1\n\t")],
)
async def test_a_text_ends_with_its_indentation(indent: int, text: str) -> None:
    async with served(b" 1\n\tx\n  y", tokenizer=Marked(*QWEN)) as server:
        answer = await infill(server, n_indent=indent)
        streamed = await server.post("/infill", CONTEXT | {"n_indent": indent, "stream": True})
    assert (answer["content"], answer["stop_type"]) == (text, "limit" if indent > 1 else "eos")
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
    assert "".join(event["content"] for event in events) == text
    assert events[-1]["stop_type"] == answer["stop_type"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_blank_line_is_not_indented(end: str) -> None:
    kept = f"a{end}  b{end}  {end}  c{end} "
    for text in (f"{kept}{end}  d", f"{kept}d"):
        limits = LineLimits(2, 0)
        pieces = [piece for character in text for piece in limits.add(character)]
        assert pieces == [ContentPiece(character) for character in kept]
        assert limits.is_finished


def test_a_text_ends_with_a_line_after_its_time() -> None:
    now = 0.0
    limits = LineLimits(0, 1.0, clock=lambda: now)
    assert not limits.is_plain
    assert [*limits.add("a\n"), *limits.add("b")] == [ContentPiece("a\n"), ContentPiece("b")]
    now = 1.5
    assert limits.add("c") == [ContentPiece("c")] and not limits.is_finished
    assert limits.add("\n  ") == [ContentPiece("\n  ")] and limits.is_finished
    assert [*limits.add("d"), *limits.flush()] == []


async def test_a_time_limit_ends_an_endless_text() -> None:
    """The answer ends at the first line that is complete after a millisecond."""
    async with served(b"a\n" * 3000, tokenizer=Marked(*QWEN), num_blocks=1024) as server:
        answer = await infill(server, t_max_predict_ms=1)
    assert answer["stop_type"] == "limit"
    assert answer["content"] == "a\n" * (len(answer["content"]) // 2)
    assert 0 < len(answer["content"]) < 6000


async def test_an_infill_is_streamed() -> None:
    async with served(b"xyz", tokenizer=Marked(*QWEN)) as server:
        response = await server.post("/infill", CONTEXT | {"stream": True, "stop": ["z"]})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    assert "".join(event["content"] for event in events) == "xy"
    assert [event["stop"] for event in events][-1] is True
    assert (events[-1]["stop_type"], events[-1]["stopping_word"]) == ("word", "z")


async def test_an_infill_that_fails_ends_with_the_error() -> None:
    async with served(b"xyz", tokenizer=Marked(*QWEN), runner=Breaking) as server:
        response = await server.post("/infill", CONTEXT | {"stream": True})
    assert "error" in json.loads(response.text.strip().splitlines()[-1][6:])
