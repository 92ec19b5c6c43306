"""What requests may say: ranges, defaults, and what is not supported yet."""

from typing import Any

import pytest

from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.schemas import unsupported
from app.generation.job import sampling_params
from batching import ModelInfo, Priority, SamplingParams
from tests.support.rows import rows
from tests.support.speaker import END, ByteTokenizer, served

NAN = float("nan")
INFINITY = float("inf")


def chat_request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return ChatCompletionRequest.model_validate(body)


def sampling(request: ChatCompletionRequest) -> SamplingParams:
    model = ModelInfo("m", ByteTokenizer(), frozenset({END}), END + 1, 128)
    return sampling_params(model, request.to_generation_params())


async def rejection(path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """Return the error that a request with these fields gets."""
    body: dict[str, Any] = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    async with served() as server:
        response = await server.post(path, body | fields)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_nothing_said_is_openais_default() -> None:
    assert sampling(chat_request()) == SamplingParams()
    assert chat_request().queue_priority is Priority.NORMAL
    assert chat_request().max_output_tokens is None


def test_all_that_is_said_reaches_the_engine() -> None:
    request = chat_request(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "8": 1.5},
        seed=-1,
    )
    assert sampling(request) == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((7, -100.0), (8, 1.5)),
        seed=-1,
    )


def test_minus_one_turns_top_k_off_too() -> None:
    assert sampling(chat_request(top_k=-1)).top_k == 0


@rows(
    ("fields", "priority"),
    [
        ({"priority": "high"}, Priority.HIGH),
        ({"priority": "normal"}, Priority.NORMAL),
        ({"priority": "low"}, Priority.LOW),
        ({"service_tier": "priority"}, Priority.HIGH),
        ({"service_tier": "flex"}, Priority.LOW),
        ({"service_tier": "auto"}, Priority.NORMAL),
        ({"service_tier": "default"}, Priority.NORMAL),
        ({"service_tier": "flex", "priority": "high"}, Priority.HIGH),
    ],
)
def test_priorities(fields: dict[str, Any], priority: Priority) -> None:
    assert chat_request(**fields).queue_priority is priority


@rows(
    "fields",
    [
        {"temperature": 2},
        {"top_p": 1},
        {"stop": []},
        {"stop": [f"s{number}" for number in range(32)]},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"user": "u", "metadata": {"k": "v"}, "parallel_tool_calls": False},
        {"safety_identifier": "s", "prompt_cache_key": "k", "unheard_of": {"x": 1}},
        {"n": 1, "logprobs": False, "top_logprobs": 0, "store": False, "verbosity": "low"},
        {"functions": [], "function_call": "auto"},
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": True}},
        {"stream_options": None},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"grammar": "", "json_schema": None},
    ],
)
def test_what_is_accepted(fields: dict[str, Any]) -> None:
    chat_request(**fields)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", NAN),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 101),
        ("repetition_penalty", INFINITY),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", "many"),
        ("max_completion_tokens", 0),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("stop", ["a"] * 33),
        ("verbosity", "silent"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("stop", {"a": 1}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token_id): 0 for token_id in range(1025)}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", "urgent"),
        ("priority", 1),
        ("service_tier", "gold"),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", None),
        ("model", 7),
        ("model", "\ud800"),
    ],
)
async def test_what_is_out_of_range_is_named(field: str, value: Any) -> None:
    error = await rejection(**{field: value})
    assert error["param"] == field
    assert len(error["message"]) < 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"1": 101}, "logit_bias.1"),
        ({"1": NAN}, "logit_bias.1"),
        ({"one": 1}, "logit_bias"),
        ({"-1": 1}, "logit_bias"),
        ({"²": 1}, "logit_bias"),
        ({"9999999999": 1}, "logit_bias"),
        ({"257": 1}, "logit_bias"),
    ],
)
async def test_a_bias_is_for_a_token_of_the_vocabulary(bias: dict[str, Any], param: str) -> None:
    assert (await rejection(logit_bias=bias))["param"] == param


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (["one"], "'one'"),
        (["one", "\n²"], r"'one, \n²'"),
        (["1" * 10_000], repr("1" * 64)),
    ],
)
async def test_biases_for_no_token_are_named(keys: list[str], shown: str) -> None:
    message = (await rejection(logit_bias={"7": 1} | dict.fromkeys(keys, 1)))["message"]
    assert message.endswith(f": {shown}")


@pytest.mark.anyio
@pytest.mark.parametrize("stop", ["", ["ok", ""]])
async def test_an_empty_stop_string_is_rejected(stop: Any) -> None:
    assert (await rejection(stop=stop))["param"].startswith("stop.")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("message", "param", "reason"),
    [
        ({"role": "function", "content": "4"}, "messages.0", "this role is called 'tool' now"),
        (
            {"role": "tool", "content": "4"},
            "messages.0.tool_call_id",
            "a tool's result needs the id of its call",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]},
            "messages.0.tool_calls.0.function",
            "Field required",
        ),
        ({"role": "", "content": "Hi"}, "messages.0.role", "String should have at least 1"),
        ({"role": "k" * 65, "content": "Hi"}, "messages.0.role", "String should have at most 64"),
        ({"role": 1, "content": "Hi"}, "messages.0.role", "Input should be a valid string"),
        ({"role": "user"}, "messages.0.content", "Field required"),
        ({"role": "user", "content": None}, "messages.0.content", "Field required"),
        ({"role": "user", "content": 7}, "messages.0.content", "Input should be a valid string"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages.0.content",
            "an image cannot be read: this model takes text only",
        ),
        (
            {"role": "user", "content": ["Hi"]},
            "messages.0.content",
            "a part must be an object with a type",
        ),
        ({"role": "user", "content": "\ud800"}, "messages.0.content", "it contains half"),
        ("Hi", "messages.0", "Input should be a valid dictionary"),
    ],
)
async def test_a_message_that_cannot_be_read_is_pointed_at(
    message: Any, param: str, reason: str
) -> None:
    error = await rejection(messages=[message])
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {reason}")


@rows(
    ("fields", "name", "value"),
    [
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": None}, "repetition_penalty", 1.5),
        ({"min_new_tokens": 3}, "min_tokens", 3),
        ({"max_output_tokens": 3}, "max_tokens", 3),
        ({"n_predict": 3}, "max_tokens", 3),
        ({"n_predict": -1}, "max_tokens", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"num_predict": -1, "max_tokens": 3}, "max_tokens", 3),
        ({"enable_thinking": False}, "thinking_switch", False),
        ({"thinking": True}, "thinking_switch", True),
        ({"thinking": {"type": "disabled"}}, "thinking_switch", False),
        ({"thinking": {"type": "adaptive"}}, "thinking_switch", None),
        ({"reasoning": {"enabled": True, "effort": "low"}}, "thinking_switch", True),
        ({"reasoning": {"effort": "low"}}, "effort", "low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "effort", "low"),
        ({"reasoning": {"exclude": True}}, "shows_reasoning", False),
        ({}, "thinking_budget", None),
        ({"thinking_token_budget": -1}, "thinking_budget", None),
        ({"thinking_token_budget": 0}, "thinking_budget", 0),
        ({"thinking_budget_tokens": 9}, "thinking_budget", 9),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking_budget", 9),
        ({"reasoning": {"max_tokens": 9}, "thinking_token_budget": 9}, "thinking_budget", 9),
        ({"reasoning": {"summary": "auto"}}, "shows_reasoning", True),
    ],
)
def test_other_servers_names_are_known(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(chat_request(**fields), name) == value


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": "1"}, "repeat_penalty"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"max_tokens": 3, "n_predict": 4}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"thinking": "yes"}, "thinking"),
        (
            {"thinking": {"type": "disabled", "budget_tokens": 9}},
            "thinking.budget_tokens",
        ),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 8, "thinking_budget_tokens": 9}, "thinking_budget_tokens"),
        (
            {"thinking_budget_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking.budget_tokens",
        ),
        ({"thinking_token_budget": -1, "reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ({"thinking": True, "enable_thinking": False}, "thinking"),
        ({"thinking": True, "reasoning": {"enabled": False}}, "reasoning"),
        (
            {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "thinking",
        ),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"top_n_sigma": -2}, "top_n_sigma"),
    ],
)
async def test_names_that_contradict_each_other_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    assert (await rejection(**fields))["param"] == param


def test_a_switch_is_a_variable_of_the_template() -> None:
    conversation = chat_request(thinking=True).to_conversation()
    assert conversation.thinking is True
    assert sampling(chat_request(top_n_sigma=1.5)).top_n_sigma == 1.5
    assert sampling(chat_request(top_n_sigma=-1)).top_n_sigma == 0


@pytest.mark.anyio
async def test_either_side_of_a_prompt_is_kept() -> None:
    fields = {"prompt": "abcdef", "echo": True, "max_tokens": 0, "truncate_prompt_tokens": 2}
    async with served() as server:
        texts = [
            (await server.complete(**fields, **side)).json()["choices"][0]["text"]
            for side in ({}, {"truncation_side": "left"}, {"truncation_side": "right"})
        ]
        long = {"prompt": "a" + 9000 * "b", "truncation_side": "right"}
        cut = (await server.complete(**fields | long)).json()["choices"][0]["text"]
    assert texts == ["ef", "ef", "ab"]
    assert cut == "ab"


@pytest.mark.anyio
async def test_a_request_can_do_without_the_prefix_cache() -> None:
    prompt = "x" * 100
    async with served() as server:
        usages = [
            (await server.complete(prompt, **fields)).json()["usage"]
            for fields in ({"cache_prompt": False}, {}, {"cache_prompt": False}, {})
        ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 0, 0, 96]


SOMETHING_ELSE: dict[str, Any] = {"n": 2, "logprobs": True, "best_of": 3, "tool_choice": "required"}


@pytest.mark.anyio
@pytest.mark.parametrize("name", list(unsupported.CHAT))
async def test_an_unsupported_chat_field_is_named(name: str) -> None:
    error = await rejection(**{name: SOMETHING_ELSE.get(name, {"some": "thing"})})
    assert error["param"] == name
    assert error["message"] == f"{name}: this is not supported"


@pytest.mark.anyio
@pytest.mark.parametrize("name", list(unsupported.COMPLETIONS))
async def test_an_unsupported_completion_field_is_named(name: str) -> None:
    value = SOMETHING_ELSE.get(name, {"some": "thing"})
    assert (await rejection("/v1/completions", **{name: value}))["param"] == name


@rows(("name", "accepted"), list(unsupported.CHAT.items()))
def test_the_default_of_an_unsupported_field_is_accepted(
    name: str, accepted: tuple[Any, ...]
) -> None:
    for value in (None, *accepted):
        chat_request(**{name: value})
