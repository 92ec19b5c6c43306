"""Images and files in each API: where they are in the prompt, and what is refused."""

import json
from typing import Any, Final

import httpx
import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseItem
from PIL import Image
from pydantic import SecretStr, TypeAdapter

from app.api.openai.responses.items.input_items import CompactionTrigger, ItemReference, parse_item
from app.api.openai.responses.stored.inputs import stored_input, stored_items
from app.storage.responses.store import StoredResponse
from tests.support.batches import chat_line, records, run
from tests.support.conversations import begin, items_of
from tests.support.fake_images import (
    FakeProcessor,
    Seeing,
    base64_of,
    data_url,
    picture,
    seeing,
)
from tests.support.images import encoded
from tests.support.rows import rows
from tests.support.sdk_types import check_shape
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
CHAT: Final = "/v1/chat/completions"
FILES: Final = "/v1/files"
BINARY: Final = b"PK\3\4\xff"
URL3: Final = data_url(picture(3))
URL5: Final = data_url(picture(5, form="JPEG"), "image/jpeg")
CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def image_url(url: str = URL3, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def input_image(url: str = URL3, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def image(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return source("image", type="base64", media_type=media_type, data=base64_of(data))


def source(kind: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "source": fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def input_text(value: str) -> dict[str, Any]:
    return {"type": "input_text", "text": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


async def post(server: Served, path: str, **fields: Any) -> Any:
    answer = await server.post(path, {"model": MODEL_ID, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def upload(server: Served, data: bytes, name: str = "a", **headers: str) -> str:
    answer = await server.client.post(
        FILES, data={"purpose": "user_data"}, files={"file": (name, data)}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


# Where they are


async def test_chat_has_images_where_their_parts_are() -> None:
    tool = {"role": "tool", "tool_call_id": "c", "content": [text("Saved."), image_url(URL5)]}
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    first = user(text("What"), text("is"), image_url(detail="high"), text("this?"))
    async with seeing() as server:
        answer = await post(server, CHAT, messages=[first, calling, tool])
        assert check_shape(answer, ChatCompletion).choices[0].message.content == "A cat."
    (prompt,) = Seeing.prompts
    assert prompt.startswith("user: What\nis(3)this?\n")
    assert "Saved.(5)" in prompt
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 3 + 2 + 5 + 2
    assert usage["prompt_tokens"] == len(prompt.replace("(3)", "_" * 5).replace("(5)", "_" * 7))


async def test_without_images_there_is_no_word_of_them() -> None:
    async with seeing() as server:
        answer = await post(server, CHAT, messages=[user(text("Hi"))])
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 0}


async def test_what_a_user_types_like_an_image_is_text() -> None:
    async with seeing() as server:
        await post(server, CHAT, messages=[user(text("<image>"), image_url(), text("<begin>"))])
    assert "<image>(3)<begin>" in Seeing.prompts[0]


async def test_equal_images_are_read_once() -> None:
    turns = [user(image_url()), {"role": "assistant", "content": "A"}, user(image_url())]
    async with seeing() as server:
        await post(server, CHAT, messages=turns)
        await post(server, CHAT, messages=turns)
        await post(server, MESSAGES, max_tokens=9, messages=[user(image(picture(3)))])
        assert len(FakeProcessor.made) == 1
    assert [prompt.count("(3)") for prompt in Seeing.prompts] == [2, 2, 1]


async def test_a_low_detail_is_fewer_pixels() -> None:
    large = data_url(picture(1024, 1024))
    async with seeing(vision_pixels=600 * 600, num_blocks=128) as server:
        for detail in ("low", "auto"):
            await post(server, CHAT, messages=[user(image_url(large, detail=detail))])
    assert [made.num_rows for made in FakeProcessor.made] == [512, 600]


async def test_responses_have_images_in_messages_and_in_results() -> None:
    result = {"type": "function_call_output", "call_id": "c", "output": [input_image(URL5)]}
    custom = {
        "type": "custom_tool_call_output",
        "call_id": "d",
        "output": [input_text("So:"), input_image()],
    }
    items = [
        user(input_text("What"), input_image(detail="original"), input_text("is it?")),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": ""},
        result,
        custom,
    ]
    async with seeing() as server:
        answer = await post(server, RESPONSES, input=items)
        count = await post(server, f"{RESPONSES}/input_tokens", input=items)
    (prompt,) = Seeing.prompts
    assert "What(3)is it?" in prompt
    assert prompt.index("(5)") < prompt.index("So:(3)")
    assert count["input_tokens"] == answer["usage"]["input_tokens"]


async def test_an_earlier_response_brings_its_images_back() -> None:
    async with seeing() as server:
        file_id = await upload(server, picture(7))
        uploaded = {"type": "input_image", "file_id": file_id, "detail": "low"}
        notes = {"type": "input_file", "file_id": await upload(server, b"1", "n.txt")}
        named = {**notes, "filename": "m.txt"}
        asked = user(input_text("What"), input_image(), uploaded, notes, named)
        output = {"type": "function_call_output", "call_id": "c", "output": [input_image(URL5)]}
        calling = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        first = await post(server, RESPONSES, input=[asked, calling, output])
        second = await post(server, RESPONSES, previous_response_id=first["id"], input="More")
        path = f"{RESPONSES}/{second['id']}/input_items?order=asc"
        listed = (await server.client.get(path)).json()["data"]
        assert len(FakeProcessor.made) == 3
    before, after = Seeing.prompts
    assert after == f"{before} A cat.\nuser: More\nassistant:"
    for item in listed:
        TypeAdapter(ResponseItem).validate_python(item)
    assert listed[0]["content"] == [
        input_text("What"),
        input_image(detail="auto"),
        uploaded,
        notes,
        named,
    ]
    assert listed[2]["output"] == [input_image(URL5, detail="auto")]


async def test_an_image_of_a_conversation_is_stored_once() -> None:
    last: dict[str, Any] = {}
    async with seeing(num_blocks=256) as server:
        for number in range(3):
            asked = [user(input_text(str(number)), input_image(), input_image("DATA:" + URL5[5:]))]
            last = {"input": asked} | ({"previous_response_id": last["id"]} if last else {})
            last = await post(server, RESPONSES, **last)
        stored = server.service.storage.responses.get("", last["id"])
        assert stored is not None
        assert sorted(stored.images.values()) == sorted([URL3, "DATA:" + URL5[5:]])
        assert "base64" not in stored.input
        path = f"{RESPONSES}/{last['id']}/input_items"
        listed = (await server.client.get(path)).json()["data"]
    assert Seeing.prompts[-1].count("(3)(5)") == 3
    images = [item["content"][1]["image_url"] for item in listed if item["role"] == "user"]
    assert images == [URL3] * 3


async def test_a_conversation_has_its_images_whole() -> None:
    async with seeing() as server:
        asked = user(input_text("One"), input_image())
        begun = await begin(server, asked)
        asked = user(input_text("Two"), input_image(URL5))
        first = await post(server, RESPONSES, conversation=begun, input=[asked])
        second = await post(server, RESPONSES, conversation=begun, input="Three")
        items = await items_of(server, begun)
        stored = server.service.storage.responses.get("", second["id"])
    assert first["status"] == "completed"
    assert [prompt.count("(3)") + prompt.count("(5)") for prompt in Seeing.prompts] == [2, 2]
    urls = [part.get("image_url") for item in items for part in item["content"]]
    assert list(filter(None, urls)) == [URL3, URL5]
    assert stored is not None
    assert sorted(stored.images.values()) == sorted([URL3, URL5])


def test_an_image_of_a_host_is_stored_as_its_url() -> None:
    part = input_image("https://example.org/a.png", detail="auto")
    item = parse_item(user(part))
    assert not isinstance(item, ItemReference | CompactionTrigger)
    given = stored_input([item])
    assert given.images == {}
    (found,) = stored_items(StoredResponse("{}", given.items, True))
    assert found["content"] == [part]


async def test_images_out_of_the_store_count_as_often_as_they_are_there() -> None:
    large = data_url(encoded(Image.effect_noise((60, 60), 100), "PNG"))
    # Less than twice the image.
    async with seeing(max_body_bytes=2 * len(large), num_blocks=256) as server:
        first = await post(server, RESPONSES, input=[user(input_image(large))])
        again = {"previous_response_id": first["id"], "input": [user(input_image(large))]}
        second = await post(server, RESPONSES, **again)
        third = await server.post(RESPONSES, {"previous_response_id": second["id"], "input": "Hi"})
    assert f"longer than {2 * len(large)} characters" in third.json()["error"]["message"]


async def test_messages_have_images_in_turns_and_in_results() -> None:
    calling = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}],
    }
    failed = [text("Broken"), image(picture(5, form="GIF"), "image/gif")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": failed, "is_error": True}
    turns = [
        user(text("What"), image(picture(3)), text("is it?")),
        calling,
        user(result, image(picture(4, form="WEBP"), "image/webp")),
    ]
    async with seeing() as server:
        answer = await post(server, MESSAGES, max_tokens=99, messages=turns)
        check_shape(answer, Message)
        count = await post(server, f"{MESSAGES}/count_tokens", messages=turns)
    (prompt,) = Seeing.prompts
    assert "What(3)is it?" in prompt
    assert prompt.index("Error: Broken(5)") < prompt.index("(4)")
    assert count["input_tokens"] == answer["usage"]["input_tokens"]


async def test_files_of_the_client_are_images_in_each_api() -> None:
    async with seeing() as server:
        file_id = await upload(server, picture(6))
        part = {"type": "input_image", "file_id": file_id}
        await post(server, RESPONSES, input=[user(part)])
        block = source("image", type="file", file_id=file_id)
        await post(server, MESSAGES, max_tokens=9, messages=[user(block)])
    assert ["(6)" in prompt for prompt in Seeing.prompts] == [True, True]


async def test_prompts_with_images_are_shown() -> None:
    messages = [user(text("What"), image_url())]
    async with seeing() as server:
        rendered = await post(server, f"{CHAT}/render", messages=messages)
        tokens = await post(server, "/tokenize", messages=messages)
        refused = await server.post("/tokenize", {"messages": messages, "add_special_tokens": True})
    assert rendered["tokens"] == tokens["tokens"]
    assert rendered["prompt"] == "user: What<begin><image><finish>\nassistant:"
    assert rendered["count"] == len("user: What\nassistant:") + 5
    assert refused.json()["error"]["param"] == "add_special_tokens"


async def test_lines_of_batches_have_images() -> None:
    async with seeing() as server:
        batch = await run(server, [chat_line("one", [text("What"), image_url()])])
        (record,) = await records(server, batch["output_file_id"])
    assert record["response"]["body"]["choices"][0]["message"]["content"] == "A cat."
    assert "What(3)" in Seeing.prompts[0]


# Files that are texts


DOCUMENT: Final = '<document name="a.md">\n# Hi\n</document>'


@rows(
    ("path", "body"),
    [
        (
            CHAT,
            {"messages": [user({"type": "file", "file": {"file_data": "#", "filename": "a.md"}})]},
        ),
        (
            RESPONSES,
            {"input": [user({"type": "input_file", "file_data": "#", "filename": "a.md"})]},
        ),
        (RESPONSES, {"input": [user({"type": "input_file", "file_id": "ID"})]}),
        (CHAT, {"messages": [user({"type": "file", "file": {"file_id": "ID"}})]}),
        (
            MESSAGES,
            {
                "max_tokens": 9,
                "messages": [
                    user(
                        source("document", type="text", media_type="text/plain", data="# Hi")
                        | {"title": "a.md"}
                    )
                ],
            },
        ),
        (
            MESSAGES,
            {"max_tokens": 9, "messages": [user(source("document", type="file", file_id="ID"))]},
        ),
    ],
)
async def test_a_file_is_its_text_with_its_name(path: str, body: Any) -> None:
    async with served(runner=Seeing) as server:
        Seeing.prompts = []
        file_id = await upload(server, b"\xef\xbb\xbf# Hi", "a.md")
        data = data_url(b"# Hi", "text/markdown")
        filled = json.dumps(body).replace('"ID"', f'"{file_id}"').replace('"#"', f'"{data}"')
        answer = await server.post(path, json.loads(filled))
        assert answer.status_code == 200, answer.text
    assert DOCUMENT in Seeing.prompts[0]


async def test_a_document_of_blocks_has_images() -> None:
    block = source("document", type="content", content=[text("Left:"), image(picture(3))])
    notes = source("document", type="content", content="Notes")
    async with seeing() as server:
        messages = [user(block | {"title": 'a "b"', "context": "Look."}, notes)]
        await post(server, MESSAGES, max_tokens=9, messages=messages)
    document = "<document name=\"a 'b'\">\nLeft:(3)</document>\n<document>\nNotes\n</document>"
    assert f"Look.\n{document}" in Seeing.prompts[0]


# What is refused


def refused_by_openai(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def refused_by_anthropic(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    param, _, message = error["message"].partition(": ")
    return param, message


async def test_a_text_model_names_the_field_of_the_image() -> None:
    reason = "an image cannot be read: this model takes text only"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image(picture(3))]}
    async with served() as server:
        chat = await server.post(CHAT, {"messages": [user(image_url())]})
        responses = await server.post(RESPONSES, {"input": [user(input_text("a"), input_image())]})
        message = await server.message([text("a"), image(picture(3))])
        nested = await server.message([result])
    assert refused_by_openai(chat)[0] == "messages.0.content"
    assert reason in refused_by_openai(chat)[1]
    assert refused_by_openai(responses)[0] == "input.0.content"
    assert refused_by_anthropic(message) == ("messages.0.content.1.image", reason)
    assert refused_by_anthropic(nested)[0] == "messages.0.content.0.tool_result.content.0.image"


CHAT_REFUSED: Final[list[tuple[Any, str, str]]] = [
    (user(image_url(detail="huge")), "messages.0.content", "auto, low, high, original"),
    (user({"type": "image_url"}), "messages.0.content", "must have an image_url with a url"),
    (user(image_url(7)), "messages.0.content", "the url of a part must be a string"),  # type: ignore[arg-type]
    (user(image_url("data:\ud800")), "messages.0.content", "half of a surrogate pair"),
    (user({"type": "input_audio"}), "messages.0.content", "'input_audio' cannot be read here"),
    (user({"type": "video_url"}), "messages.0.content", "'video_url' cannot be read here"),
    (user({"type": "file"}), "messages.0.content", "must have a file"),
    (user({"type": "file", "file": {}}), "messages.0.content", "its file_data or a file_id"),
    (
        user({"type": "file", "file": {"file_data": base64_of(BINARY)}}),
        "messages.0.content",
        "the file is no PDF and no text in UTF-8",
    ),
    (user({"type": "file", "file": {"file_data": "?"}}), "messages.0.content", "not valid base64"),
    (
        {"role": "system", "content": [image_url()]},
        "messages.0.content",
        "a turn of the role 'system' has no images",
    ),
    (
        {"role": "assistant", "content": [image_url()]},
        "messages.0.content",
        "a turn of the role 'assistant' has no images",
    ),
    (user(image_url("file:///etc/passwd")), "messages.0.content", "and no other scheme"),
    (user(image_url("https://example.org/a.png")), "messages.0.content", "MEDIA_DOMAINS"),
    (user(image_url(data_url(b"GIF89a"))), "messages.0.content", "the image"),
    (user(image_url(data_url(picture(3, 1)))), "messages.0.content", "the image is too flat"),
    (
        user(*[image_url(data_url(picture(n))) for n in (2, 3, 4)]),
        "messages.0.content",
        "limit of 2",
    ),
    (user({"type": "file", "file": {"file_id": "file-1"}}), "messages.0.content", "'file-1'"),
]


async def test_chat_names_the_field_that_cannot_be_read() -> None:
    async with seeing(max_images=2) as server:
        for message, param, reason in CHAT_REFUSED:
            refused = await server.post(CHAT, {"messages": [message]})
            assert refused_by_openai(refused)[0] == param
            assert reason in refused_by_openai(refused)[1]


RESPONSES_REFUSED: Final[list[tuple[Any, str, str]]] = [
    (user(input_image(detail="x")), "input.0.content", "the detail of an image"),
    (user({"type": "input_image"}), "input.0.content", "an image_url or a file_id"),
    (user(input_image(file_id="a")), "input.0.content", "an image_url or a file_id"),
    (user({"type": "input_image", "file_id": "file-1"}), "input.0.content", "'file-1'"),
    (user({"type": "input_file", "file_url": "https://a"}), "input.0.content", "by URL"),
    (user({"type": "input_audio"}), "input.0.content", "'input_audio' cannot be read here"),
    (
        {"role": "assistant", "content": [input_image()]},
        "input.0.content",
        "a turn of the role 'assistant'",
    ),
    (
        {"type": "reasoning", "summary": [input_image()]},
        "input.0.summary",
        "'input_image' cannot be read here: only text",
    ),
    (
        {"type": "function_call_output", "call_id": "a", "output": [input_image("data:,")]},
        "input.0.output",
        "data:image/png;base64",
    ),
]


async def test_responses_name_the_field_that_cannot_be_read() -> None:
    async with seeing() as server:
        for item, param, reason in RESPONSES_REFUSED:
            refused = await server.post(RESPONSES, {"input": [item]})
            assert refused_by_openai(refused)[0] == param
            assert reason in refused_by_openai(refused)[1]


IMAGE: Final = "messages.0.content.0.image"
DOCUMENT_FIELD: Final = "messages.0.content.0.document"
MESSAGES_REFUSED: Final[list[tuple[Any, str, str]]] = [
    (image(b"", "image/tiff"), f"{IMAGE}.source.base64.media_type", "Input should be"),
    (image(b"no"), IMAGE, "the image"),
    (source("image", type="s3"), f"{IMAGE}.source", "'base64', 'url', 'file'"),
    (source("image", type="url", url="http://a/b.png"), IMAGE, "MEDIA_DOMAINS"),
    (source("image", type="file", file_id="file_1"), IMAGE, "'file_1'"),
    (
        source("document", type="base64", media_type="application/pdf", data="?"),
        DOCUMENT_FIELD,
        "the file is not valid base64",
    ),
    (
        source("document", type="base64", media_type="application/pdf", data=base64_of(BINARY)),
        DOCUMENT_FIELD,
        "the file is no PDF and no text in UTF-8",
    ),
    (
        source("document", type="base64", media_type="text/plain", data=""),
        f"{DOCUMENT_FIELD}.source.base64.media_type",
        "'application/pdf'",
    ),
    (source("document", type="url", url="https://a"), f"{DOCUMENT_FIELD}.source", "by URL"),
    (
        source("document", type="s3"),
        f"{DOCUMENT_FIELD}.source",
        "'text', 'content', 'file', 'base64'",
    ),
    ({"type": "document"}, f"{DOCUMENT_FIELD}.source", "Field required"),
    ({"type": "document", "source": 1}, f"{DOCUMENT_FIELD}.source", "Input should be"),
    (
        source("document", type="text", data="a") | {"citations": {"enabled": True}},
        f"{DOCUMENT_FIELD}.citations",
        "this is not supported",
    ),
    (source("document", type="file", file_id="f"), DOCUMENT_FIELD, "there is no file with the id"),
    ({"type": "search_result"}, "messages.0.content.0.search_result", "cannot be read here"),
]


async def test_messages_name_the_field_that_cannot_be_read() -> None:
    async with seeing() as server:
        for block, param, reason in MESSAGES_REFUSED:
            found = refused_by_anthropic(await server.message([block]))
            assert found[0] == param
            assert reason in found[1]


async def test_only_turns_of_users_have_images_in_messages() -> None:
    messages = [{"role": "assistant", "content": [image(picture(3))]}]
    async with seeing() as server:
        refused = await server.post(MESSAGES, {"max_tokens": 1, "messages": messages})
    assert "no blocks of type image" in refused_by_anthropic(refused)[1]


async def test_a_file_of_another_key_is_none() -> None:
    keys = SecretStr("sk-one,sk-two")
    async with seeing(api_keys=keys) as server:
        owner, other = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        file_id = await upload(server, picture(6), **owner)
        body = {"input": [user({"type": "input_image", "file_id": file_id})]}
        taken = await server.client.post(RESPONSES, json=body, headers=owner)
        refused = await server.client.post(RESPONSES, json=body, headers=other)
    assert taken.status_code == 200
    assert refused_by_openai(refused) == (
        "input.0.content",
        f"there is no file with the id '{file_id}'",
    )


async def test_a_file_that_is_too_large_is_refused() -> None:
    async with seeing(max_image_mib=1, max_body_bytes=2048) as server:
        large = await upload(server, b"a" * ((1 << 20) + 1))
        notes = [await upload(server, b"a" * 1100) for _ in range(2)]
        image_part = {"type": "input_image", "file_id": large}
        refused = await server.post(RESPONSES, {"input": [user(image_part)]})
        assert "1 MiB (MLX_SERVER_MAX_IMAGE_MIB)" in refused_by_openai(refused)[1]
        parts = [{"type": "input_file", "file_id": file_id} for file_id in notes]
        refused = await server.post(RESPONSES, {"input": [user(*parts)]})
        assert "2048 bytes (MLX_SERVER_MAX_BODY_BYTES)" in refused_by_openai(refused)[1]
        assert (await server.post(RESPONSES, {"input": [user(parts[0])]})).status_code == 200


async def test_a_file_that_is_gone_or_no_text_is_refused() -> None:
    async with seeing() as server:
        binary, gone = await upload(server, BINARY, "b.zip"), await upload(server, b"a")
        server.service.storage.batch.files.path(gone).unlink()
        for file_id, reason in ((binary, "the file 'b.zip' is no PDF"), (gone, "there is no file")):
            part = {"type": "input_file", "file_id": file_id}
            refused = await server.post(RESPONSES, {"input": [user(part)]})
            assert reason in refused_by_openai(refused)[1]


async def test_images_fit_or_are_refused_where_prompts_are_cut() -> None:
    async with seeing() as server:
        fits = await server.post(RESPONSES, {"input": [user(input_image())], "truncation": "auto"})
        assert fits.status_code == 200
        long = [user(input_text("a" * 3000), input_image())]
        cut = await server.post(RESPONSES, {"input": long, "truncation": "auto"})
        assert refused_by_openai(cut) == ("truncation", "a prompt with images cannot be truncated")
        whole = await server.post(RESPONSES, {"input": long})
        assert whole.json()["error"]["code"] == "context_length_exceeded"


async def test_the_models_tell_what_they_read() -> None:
    async with seeing(max_images=5) as server:
        await server.chat()
        (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert "vision" in card["capabilities"]
    assert card["max_images"] == 5
    assert card["architecture"] == {
        "input_modalities": ["text", "image"],
        "output_modalities": ["text"],
    }
    async with served() as server:
        await server.chat()
        (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert "vision" not in card["capabilities"]
    assert card["architecture"]["input_modalities"] == ["text"]
    assert card["max_images"] is None


async def test_decisions_have_images_in_their_input_once_for_all_questions() -> None:
    questions = [{"type": "predicate", "instructions": f"Is it {i}?"} for i in range(3)]
    async with seeing() as server:
        asked = user(input_text("What"), input_image(), input_text("is it?"))
        answer = await post(server, "/v1/decisions", input=[asked], questions=questions)
        assert len(answer["answers"]) == 3
        assert (await server.engine.stats()).num_images_encoded == 1
    assert all("user: What(3)is it?\n\nQuestion: Is it" in each for each in Seeing.prompts)
    assert len(Seeing.prompts) == 3
