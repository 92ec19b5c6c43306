"""PDFs in each API: their texts page by page, images of scanned pages, and what is refused."""

from typing import Any, Final

import pytest

from app.media import pdf_files
from tests.support.batches import chat_line, records, run
from tests.support.fake_images import FakeProcessor, Seeing, base64_of, data_url, picture, seeing
from tests.support.pdfs import ENCRYPTED, LAUGHS, of_tree, pdf
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
CHAT: Final = "/v1/chat/completions"
# The requests that count what those of the APIs would use.
COUNTS: Final = {RESPONSES: f"{RESPONSES}/input_tokens", MESSAGES: f"{MESSAGES}/count_tokens"}
TEXT: Final = pdf("One", "", "Three\nlines")
DOCUMENT: Final = (
    '<document name="a.pdf">\n<page 1>\nOne\n<page 2>\n<page 3>\nThree\nlines\n</document>'
)
SCANNED: Final = pdf("One", None, "Three", None)
# Of a page of 200 by 100 points, the pixels of a row.
WIDTH: Final = 45


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def chat(**file: str) -> dict[str, Any]:
    return {"messages": [user({"type": "file", "file": file})]}


def responses(**file: str) -> dict[str, Any]:
    return {"input": [user({"type": "input_file", **file})]}


def called(**file: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = [{"type": "input_file", **file}]
    return {"input": [call, {"type": "function_call_output", "call_id": "c", "output": output}]}


def document(title: str | None = "a.pdf", **source: str) -> dict[str, Any]:
    return {"type": "document", "source": source, "title": title}


def inline(data: bytes, title: str | None = "a.pdf") -> dict[str, Any]:
    return document(title, type="base64", media_type="application/pdf", data=base64_of(data))


def messages(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 99, "messages": [user(*blocks)]}


def result(*blocks: Any) -> dict[str, Any]:
    calling = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}],
    }
    results = user({"type": "tool_result", "tool_use_id": "t", "content": [*blocks]})
    return {"max_tokens": 99, "messages": [calling, results]}


async def upload(server: Served, data: bytes, name: str = "a.pdf") -> str:
    answer = await server.client.post(
        "/v1/files", data={"purpose": "user_data"}, files={"file": (name, data)}
    )
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


async def post(server: Served, path: str, body: dict[str, Any]) -> Any:
    answer = await server.post(path, {"model": MODEL_ID, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def check_count(server: Served, path: str, body: dict[str, Any], usage: Any) -> int:
    """Check that the request is counted as it was used; return the count."""
    counted: int = (await post(server, COUNTS[path], body))["input_tokens"]
    # Messages has what was found in the prefix cache apart.
    assert counted == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    return counted


async def refused(server: Served, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return the field and the reason of a 400."""
    answer = await server.post(path, {"model": MODEL_ID, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if "param" in error:
        return error["param"], error["message"].removeprefix(f"{error['param']}: ")
    param, _, reason = error["message"].partition(": ")
    return param, reason


async def test_it_is_the_text_per_page_in_each_api() -> None:
    sent = {"file_data": data_url(TEXT, "application/pdf"), "filename": "a.pdf"}
    async with served(runner=Seeing, num_blocks=128) as server:
        file_id = await upload(server, TEXT)
        for path, body in [
            (CHAT, chat(**sent)),
            (CHAT, chat(file_data=base64_of(TEXT), filename="a.pdf")),
            (CHAT, chat(file_id=file_id)),
            (RESPONSES, responses(**sent)),
            (RESPONSES, responses(file_id=file_id)),
            (RESPONSES, called(**sent)),
            (MESSAGES, messages(inline(TEXT))),
            (MESSAGES, messages(document(None, type="file", file_id=file_id))),
            (MESSAGES, result(inline(TEXT))),
        ]:
            Seeing.prompts = []
            answer = await post(server, path, body)
            (prompt,) = Seeing.prompts
            assert DOCUMENT in prompt, path
            if path in COUNTS:
                assert await check_count(server, path, body, answer["usage"]) == len(prompt)


async def test_a_page_without_text_is_an_image_in_its_place() -> None:
    sent = {"file_data": base64_of(SCANNED)}
    pages = f"<page 1>\nOne\n<page 2>\n({WIDTH})\n<page 3>\nThree\n<page 4>\n({WIDTH})"
    async with seeing(vision_pixels=1024, num_blocks=128) as server:
        for path, body in [
            (RESPONSES, responses(**sent)),
            (RESPONSES, called(**sent)),
            (MESSAGES, messages(inline(SCANNED, None))),
            (MESSAGES, result(inline(SCANNED, None))),
            (CHAT, chat(**sent)),
        ]:
            Seeing.prompts = []
            answer = await post(server, path, body)
            (prompt,) = Seeing.prompts
            assert f"<document>\n{pages}\n</document>" in prompt, path
            if path in COUNTS:
                await check_count(server, path, body, answer["usage"])
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * (WIDTH + 2)
        # Each page was drawn once, though the requests repeat it.
        assert [made.num_rows for made in FakeProcessor.made] == [WIDTH] * 2


async def test_pages_without_text_count_as_images() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    image["source"] |= {"data": base64_of(picture(3))}  # type: ignore[operator]
    async with seeing(vision_pixels=1024, max_images=2) as server:
        await post(server, MESSAGES, messages(inline(SCANNED), inline(TEXT)))
        assert await refused(server, MESSAGES, messages(image, inline(SCANNED))) == (
            "messages.0.content.0.image",
            "the request has more images, pages without text included, than the limit of 2 (MLX_SERVER_MAX_IMAGES)",
        )


async def test_all_pdfs_of_a_request_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_files, "MAX_PAGES", 5)
    async with seeing() as server:
        await post(server, MESSAGES, messages(inline(TEXT)))
        assert await refused(server, MESSAGES, messages(inline(TEXT), inline(TEXT, "b.pdf"))) == (
            "messages.0.content.1.document",
            "the file 'b.pdf': the PDFs have more pages than the limit of 5",
        )


async def test_a_text_model_says_which_page_has_no_text() -> None:
    reason = "has no text, and an image of it cannot be read: this model takes text only"
    async with served() as server:
        assert await refused(server, RESPONSES, called(file_data=base64_of(SCANNED))) == (
            "input.1.output",
            f"page 2 of the file {reason}",
        )
        two = messages(inline(TEXT), inline(SCANNED))
        assert await refused(server, MESSAGES, two) == (
            "messages.0.content.1.document",
            f"page 2 of the file 'a.pdf' {reason}",
        )


async def test_an_earlier_response_brings_its_pdfs_back() -> None:
    part = {"type": "input_file", "file_data": base64_of(SCANNED), "filename": "a.pdf"}
    async with seeing(vision_pixels=1024, num_blocks=128) as server:
        first = await post(server, RESPONSES, {"input": [user(part)]})
        more = {"previous_response_id": first["id"], "input": "More"}
        second = await post(server, RESPONSES, more)
        path = f"{RESPONSES}/{second['id']}/input_items?order=asc"
        listed = (await server.client.get(path)).json()["data"]
    before, after = Seeing.prompts
    assert after == f"{before} A cat.\nuser: More\nassistant:"
    assert listed[0]["content"] == [part]


async def test_lines_of_batches_have_pdfs() -> None:
    file = {"type": "file", "file": {"file_data": base64_of(TEXT), "filename": "a.pdf"}}
    async with seeing() as server:
        batch = await run(server, [chat_line("one", [file])])
        (record,) = await records(server, batch["output_file_id"])
    assert record["response"]["status_code"] == 200
    assert DOCUMENT in Seeing.prompts[0]


HOSTILE: Final = [
    (b"%PDF-1.7 and no more", "is damaged, incomplete or without pages"),
    (TEXT[:-120], "is damaged, incomplete or without pages"),
    (pdf(), "is damaged, incomplete or without pages"),
    (ENCRYPTED, "is encrypted: send it without a password"),
    (of_tree(f"/Kids [{'3 0 R ' * 601}] /Count 601"), "more pages than the limit of 600"),
    (LAUGHS, "cannot be read within the limits of 1 seconds and 1024 MiB"),
]


async def test_a_hostile_pdf_is_refused_and_the_server_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batching.media.pdf_reader._CPU_SECONDS", 1)
    async with seeing() as server:
        for data, reason in HOSTILE:
            param, message = await refused(server, MESSAGES, messages(inline(data)))
            assert param == "messages.0.content.0.document"
            assert message.startswith("the file 'a.pdf'")
            assert reason in message
        damaged = {"file_id": await upload(server, TEXT[:-120], "b.pdf")}
        for path, body, field in (
            (RESPONSES, responses(**damaged), "input.0.content"),
            (CHAT, chat(**damaged), "messages.0.content"),
        ):
            reason = "the file 'b.pdf' is damaged, incomplete or without pages"
            assert await refused(server, path, body) == (field, reason)
        await post(server, MESSAGES, messages(inline(TEXT)))
    assert len(Seeing.prompts) == 1
