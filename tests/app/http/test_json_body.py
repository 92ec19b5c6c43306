"""JSON bodies: what is accepted, what is rejected, and the count of parts."""

import gzip
import json
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import example, given, strategies as st

from app.http import errors
from app.http.json_body import MAX_PARTS, JsonRoute, num_parts, read_json

pytestmark = pytest.mark.anyio

TEXT = st.text(st.sampled_from('[]{}:"\\,a\u00fc'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def parts_of(value: Any) -> int:
    match value:
        case dict():
            return 1 + len(value) + sum(map(parts_of, value.values()))
        case list():
            return 1 + sum(map(parts_of, value))
        case _:
            return 0


@given(VALUES, st.booleans())
@example('"[', False)
@example(["\\", '"', "[{:", '\\"', ""], False)
def test_the_count_of_parts_is_exact_beyond_the_limit(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    many = MAX_PARTS * b"[" + body
    assert num_parts(body) >= parts_of(value)
    assert num_parts(many) == (MAX_PARTS + parts_of(value) if num_parts(body) > 0 else MAX_PARTS)
    assert read_json(body) == value


def test_brackets_in_strings_are_text() -> None:
    text = "[{:" * MAX_PARTS
    assert read_json(json.dumps([text, 1]).encode()) == [text, 1]


def app() -> FastAPI:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/count")
    async def count(body: dict[str, Any]) -> int:
        return len(body)

    made = FastAPI()
    errors.register_handlers(made)
    made.include_router(router)
    return made


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + b"[]," * MAX_PARTS + b"1]", f"more than {MAX_PARTS} lists, objects and members"),
        (b'{"a":' * MAX_PARTS, f"more than {MAX_PARTS} lists, objects and members"),
        (b"[" * 100_000, "not valid JSON: it is nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON: a number has too many digits"),
        (b'{"a": "\xff"}', "not valid JSON: it is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON: it is not UTF-8"),
        (b'{"a": 1', "not valid JSON: Expecting ',' delimiter"),
        (b"[]", "must be a JSON object"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
async def test_what_cannot_be_parsed_is_a_400(body: bytes, message: str) -> None:
    transport = httpx.ASGITransport(app())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"Content-Type": "application/json"}
        rejected = await client.post("/count", content=body, headers=headers)
        taken = await client.post("/count", content=b'\xef\xbb\xbf{"a": 1}', headers=headers)
    assert rejected.status_code == 400
    assert message in rejected.json()["error"]["message"]
    assert taken.json() == 1


async def test_a_body_with_an_encoding_is_a_415() -> None:
    transport = httpx.ASGITransport(app())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        rejected = await client.post("/count", content=gzip.compress(b"{}"), headers=headers)
        for encoding in ("identity", "UTF-8", ""):
            headers = {"Content-Encoding": encoding}
            taken = await client.post("/count", json={"a": 1}, headers=headers)
            assert taken.json() == 1
    assert rejected.status_code == 415
    assert "Content-Encoding: gzip" in rejected.json()["error"]["message"]
