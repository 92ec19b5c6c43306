"""What the parameters of a request do to its answer, over a model that says a given text."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.completions.request import CompletionRequest
from app.api.openai.logprobs import token_name
from app.generation.job import GenerationJob, build_job
from app.prompts.render import completion_prompt
from batching import InvalidRequest
from tests.support.byte_tokenizers import Bytes, Thinking
from tests.support.chunks import chunks
from tests.support.rows import rows
from tests.support.speaker import END, ByteTokenizer, served

pytestmark = pytest.mark.anyio

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = b'<tool_call>\n{"name": "add", "arguments": {"x": 12}}\n</tool_call>'
ARGUMENTS = '{"x": 12}'


USER = {"role": "user", "content": "Hi"}
DEEP: list[Any] = []
for _ in range(40):
    DEEP = [DEEP]


class Native(ByteTokenizer):
    """Has a template that takes tools, and one option that it cannot use."""

    has_tool_calling = True
    tool_call_start = "<tool_call>"
    tool_call_end = "</tool_call>"
    chat_template = "{{ tools }}"

    @property
    def tool_parser(self) -> Any:
        from mlx_lm.tool_parsers import json_tools

        return json_tools.parse_tool_call

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        if "shape" in kwargs:
            raise TypeError("a shape is no colour")
        tools = kwargs.pop("tools", [])
        text = super().apply_chat_template(conversation, **{**kwargs, "tokenize": False})
        return "".join(tool["function"]["name"] for tool in tools) + text


def chat_request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], **fields}
    )


async def test_a_call_is_sent_in_openais_words() -> None:
    async with served(b"Well. " + CALL) as server:
        answer = (await server.chat("Hi", tools=TOOLS)).json()
        only_call = (await server.chat("Hi", tools=TOOLS, stop=["zzz"])).json()
        response = await server.chat("Hi", tools=TOOLS, stream=True)
        ignored = (await server.chat("Hi", tools=TOOLS, tool_choice="none")).json()
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    assert only_call["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [c["delta"] for part in chunks(response) for c in part["choices"]]
    reported = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert reported[0]["function"] == {"name": "add", "arguments": ""}
    assert {call["index"] for call in reported} == {0}
    assert "".join(call["function"]["arguments"] for call in reported) == ARGUMENTS
    assert all(call.keys() == {"index", "function"} for call in reported[1:])
    assert CALL.decode() in ignored["choices"][0]["message"]["content"]


async def test_the_tokens_of_a_call_are_sent_though_they_are_no_text() -> None:
    async with served(CALL) as server:
        response = await server.chat("Hi", tools=TOOLS, logprobs=True, stream=True)
    reported = [
        each["token"]
        for part in chunks(response)
        for choice in part["choices"]
        for each in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(reported) == CALL.decode()


async def test_beside_a_call_without_text_the_content_is_null() -> None:
    async with served(CALL) as server:
        message = (await server.chat("Hi", tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_one_call_ends_an_answer_that_may_have_no_more() -> None:
    async with served(CALL + b"\n" + CALL) as server:
        two = (await server.chat("Hi", tools=TOOLS)).json()
        one = (await server.chat("Hi", tools=TOOLS, parallel_tool_calls=False)).json()
        num_unfinished = await server.num_unfinished()
    assert len(two["choices"][0]["message"]["tool_calls"]) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert num_unfinished == 0


async def test_calls_of_a_template_that_knows_tools() -> None:
    async with served(CALL, tokenizer=Native()) as server:
        answer = (await server.chat("Hi", tools=TOOLS)).json()
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
        rendered = (await server.post("/v1/chat/completions/render", body)).json()
        rejected = await server.chat("Hi", chat_template_kwargs={"shape": "blue"})
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert rendered["prompt"].startswith("adduser: Hi")
    assert rejected.json()["error"]["param"] == "chat_template_kwargs"


class Tagged(Native):
    """Writes its calls in tags, which mlx-lm's function reads when they are whole."""

    @property
    def tool_parser(self) -> Any:
        from mlx_lm.tool_parsers import qwen3_coder

        return qwen3_coder.parse_tool_call


async def test_a_call_that_only_mlx_lm_can_read_is_sent_when_it_is_whole() -> None:
    tags = (
        b"<tool_call>\n<function=add>\n<parameter=x>\n12\n</parameter>\n</function>\n</tool_call>"
    )
    async with served(b"Well." + tags, tokenizer=Tagged()) as server:
        (choice,) = (await server.chat("Hi", tools=TOOLS)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Well."
    assert call["function"] == {"name": "add", "arguments": ARGUMENTS}


async def test_a_call_that_must_be_made_is_what_the_grammar_allows() -> None:
    async with served(CALL + b"and more", tokenizer=Bytes()) as server:
        fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        answer = (await server.chat("Hi", **fields)).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] <= len(CALL)


async def test_reasoning_is_sent_apart_from_the_answer() -> None:
    async with served(b"<think>Hm.</think>\n\nYes.", tokenizer=Thinking()) as server:
        answer = (await server.chat("Hi")).json()
        deltas = [
            choice["delta"]
            for part in chunks(await server.chat("Hi", stream=True))
            for choice in part["choices"]
        ]
        quiet = (await server.chat("Hi", include_reasoning=False, logprobs=True)).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    details = answer["usage"]["completion_tokens_details"]
    assert 3 <= details["reasoning_tokens"] < len("<think>Hm.</think>")
    for name, text in (("reasoning_content", "Hm."), ("reasoning", "Hm."), ("content", "Yes.")):
        assert "".join(delta.get(name, "") for delta in deltas) == text
    assert "reasoning" not in quiet["choices"][0]["message"]
    reported = "".join(each["token"] for each in quiet["choices"][0]["logprobs"]["content"])
    assert "Hm" not in reported
    assert reported.endswith("Yes.")


async def test_a_prompt_may_end_inside_the_reasoning() -> None:
    async with served(b"Hm.</think>Yes.", tokenizer=Thinking()) as server:
        answer = (await server.chat("Hi", reasoning_effort="high")).json()
        low = (await server.chat("Hi", reasoning_effort="none")).json()
        switched = (await server.chat("Hi", enable_thinking=True)).json()
        hidden = (await server.chat("Hi", thinking=True, reasoning={"exclude": True})).json()
    assert answer["choices"][0]["message"]["reasoning"] == "Hm."
    assert low["choices"][0]["message"]["content"] == "Hm.Yes."
    assert switched["choices"][0]["message"]["reasoning"] == "Hm."
    assert hidden["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "annotations": [],
    }


class SpecialMarkers(ByteTokenizer):
    """Marks its reasoning with tokens that are special, as other ones are."""

    has_thinking = True
    think_start = "{"
    think_end = "}"
    all_special_ids = (END, ord("{"), ord("}"), ord("~"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [t for t in token_ids if not skip_special_tokens or t not in self.all_special_ids]
        return super().decode(kept, skip_special_tokens=skip_special_tokens)


async def test_markers_are_seen_where_they_are_special_tokens() -> None:
    async with served(b"{h~m}y~es", tokenizer=SpecialMarkers()) as server:
        message = (await server.chat("Hi")).json()["choices"][0]["message"]
        shown = (await server.chat("Hi", skip_special_tokens=False)).json()
    assert (message["reasoning"], message["content"]) == ("hm", "yes")
    assert shown["choices"][0]["message"]["content"] == "y~es"


async def test_a_model_that_reasons_does_so_before_it_keeps_to_a_grammar() -> None:
    async with served(b"Hm.</think>\n{}", tokenizer=Thinking()) as server:
        fields = {"reasoning_effort": "high", "response_format": {"type": "json_object"}}
        message = (await server.chat("Hi", **fields)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "{}")


async def test_a_grammar_of_llama_cpp_is_followed() -> None:
    async with served(b"yes", tokenizer=Bytes()) as server:
        chat = (await server.chat("Hi", grammar='root ::= "yes" | "no"')).json()
        text = (await server.complete("Hi", grammar="root ::= [a-z]+")).json()
    async with served(b"no", tokenizer=Bytes()) as server:
        failed = await server.chat("Hi", grammar='root ::= "yes"')
    assert chat["choices"][0]["message"]["content"] == "yes"
    assert text["choices"][0]["text"] == "yes"
    assert failed.status_code == 500


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_max_tokens_beyond_the_context_are_clamped_if_so_set(path: str) -> None:
    async with served(b"Hello") as server:
        refused = (await getattr(server, path)("Hi", max_tokens=5000)).json()["error"]
        long = (await getattr(server, path)("Hi" * 2000, max_tokens=5000)).json()["error"]
        many = (await getattr(server, path)("Hi", max_tokens=300_000)).json()["error"]
    async with served(b"Hello", clamp_max_tokens=True) as server:
        served_all = (await getattr(server, path)("Hi", max_tokens=5000)).json()
        still_long = (await getattr(server, path)("Hi" * 2000, max_tokens=5000)).json()["error"]
    assert refused["code"] == long["code"] == still_long["code"] == "context_length_exceeded"
    assert "MLX_SERVER_CLAMP_MAX_TOKENS=true" in refused["message"]
    assert refused["message"].startswith("This model's maximum context length is 2048 tokens.")
    assert "MLX_SERVER" not in long["message"] + still_long["message"]
    assert many["param"] == "max_tokens"
    assert served_all["usage"]["completion_tokens"] == 6


async def test_a_role_of_the_template_is_passed_on() -> None:
    turn = {"role": "documents", "content": "Some."}
    async with served() as server:
        rendered = await server.post("/v1/chat/completions/render", {"messages": [turn]})
    assert rendered.json()["prompt"] == "documents: Some.\nassistant:"


@rows(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"json_schema": {"type": "object"}},
        {"structured_outputs": {"json": {"type": "object"}}},
    ],
)
async def test_an_answer_ends_where_its_grammar_does(fields: dict[str, Any]) -> None:
    async with served(b'{"a": 1} and more', tokenizer=Bytes()) as server:
        answer = (await server.chat("Hi", **fields)).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a": 1}', "stop")


async def test_a_grammar_that_cannot_be_compiled_is_the_clients_fault() -> None:
    async with served(tokenizer=Bytes()) as server:
        bad = (await server.complete(structured_outputs={"regex": "(("})).json()
        without = (await server.chat(tools=TOOLS, tool_choice="auto")).status_code
    assert bad["error"]["param"] == "structured_outputs"
    assert without == 200


@rows(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 3, "max_completion_tokens": 2}, "min_tokens"),
        ({"stop": "x" * 1025}, "stop.0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"return_progress": True}, "return_progress"),
        ({"stop_token_ids": [END + 1]}, "stop_token_ids"),
        ({"allowed_token_ids": [END + 1]}, "allowed_token_ids"),
        (
            {"allowed_token_ids": [1], "structured_outputs": {"json_object": True}},
            "allowed_token_ids",
        ),
        (
            {"allowed_token_ids": [1], "response_format": {"type": "json_object"}},
            "allowed_token_ids",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"_secret": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 70_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": [0] * 70_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": float("nan")}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"raise_exception": "x"}}, "chat_template_kwargs"),
        ({"allowed_token_ids": [1] * 300_000}, "allowed_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"structured_outputs": {"json": " " * 600_000 + "{}"}}, "structured_outputs.json"),
        ({"grammar": "a" * 65_537}, "grammar"),
        ({"grammar": "start: 'a'"}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "json_schema"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {"allowed_token_ids": [1], "tools": TOOLS, "tool_choice": "required"},
            "allowed_token_ids",
        ),
        ({"messages": [USER] * 8193}, "messages"),
        ({"messages": [USER, *[{"role": "assistant", "tool_calls": [0] * 4097}] * 2]}, "messages"),
        ({"messages": [0]}, "messages.0"),
        ({"messages": {"0": USER}}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages.0.tool_calls"),
    ],
)
async def test_what_contradicts_itself_names_a_field(fields: dict[str, Any], param: str) -> None:
    async with served(tokenizer=Bytes()) as server:
        response = await server.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 3, "best_of": 2}, "best_of"), ({"prompt": ["a"] * 600, "n": 2}, "n")],
)
async def test_completions_that_contradict_themselves(fields: dict[str, Any], param: str) -> None:
    async with served() as server:
        response = await server.complete(**fields)
    assert response.json()["error"]["param"] == param


async def test_ends_and_stops() -> None:
    async with served(b"abc.de") as server:
        kept = await server.chat(stop=["."], include_stop_str_in_output=True)
        late = await server.chat(stop=["a", "."], min_tokens=2)
        token = await server.chat(stop_token_ids=[ord("c")])
        shown = await server.chat(stop_token_ids=[ord("c")], include_stop_str_in_output=True)
        never = await server.chat(ignore_eos=True, max_tokens=9, skip_special_tokens=False)
    texts = [
        response.json()["choices"][0]["message"]["content"]
        for response in (kept, late, token, shown, never)
    ]
    assert texts == ["abc.", "abc", "ab", "abc", "abc.de<end><end><end>"]
    assert never.json()["choices"][0]["finish_reason"] == "length"


async def test_what_the_engine_is_asked() -> None:
    body = chat_request(min_tokens=2, bad_words=["no", " so"], allowed_token_ids=[1, 2])
    async with served() as server:

        def job(body: ChatCompletionRequest) -> GenerationJob:
            params = body.to_generation_params()
            return build_job(
                server.engine, [[1]], params, completion_id="c", max_output_tokens=1000
            )

        made = job(body)
        ends = job(chat_request(ignore_eos=True, stop_token_ids=[7]))
        with pytest.raises(InvalidRequest):
            job(chat_request(stop_token_ids=[END + 1]))
    assert made.spec.sampling.min_tokens == 2
    assert made.spec.sampling.bad_words == (tuple(b"no"), tuple(b" no"), tuple(b" so"))
    assert made.spec.stop_token_ids == {END}
    assert made.spec.constraint is not None
    assert ends.spec.stop_token_ids == {7}
    assert ends.spec.constraint is None


async def test_long_prompts_are_cut_at_their_beginning() -> None:
    prompt = list(range(100))
    async with served(num_blocks=2) as server:
        model = server.engine.model

        def truncated(body: ChatCompletionRequest) -> list[int]:
            return completion_prompt(
                model, prompt, add_special_tokens=False, truncation=body.truncation()
            )

        assert truncated(chat_request()) == prompt
        assert truncated(chat_request(truncate_prompt_tokens=3)) == prompt[-3:]
        fits = chat_request(truncate_prompt_tokens=-1, max_tokens=10)
        assert truncated(fits) == prompt[-54:]
        # More output than the context has: that is refused or reduced, and the prompt stays.
        assert truncated(chat_request(truncate_prompt_tokens=-1, max_tokens=999)) == prompt[-32:]
        answer = (await server.complete(prompt, truncate_prompt_tokens=5)).json()
        filled = (await server.complete(prompt, truncate_prompt_tokens=-1, max_tokens=4)).json()
        default = (await server.complete(prompt, truncate_prompt_tokens=-1)).json()
    assert filled["usage"]["prompt_tokens"] == 60
    assert default["usage"]["prompt_tokens"] == 48
    assert answer["usage"]["prompt_tokens"] == 5
    assert CompletionRequest(prompt=["a"]).num_logprobs is None


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    assert token_name("é".encode()) == "é"
    assert token_name(b"\xe6\x97") == "bytes:\\xe6\\x97"


async def test_salted_caches_are_apart() -> None:
    async with served() as server:
        fields = {"prompt": "x" * 100, "max_tokens": 1}
        cached = [
            (await server.post("/v1/completions", fields | salt)).json()["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for salt in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {})
        ]
    assert cached == [0, 96, 0, 0]
