"""JSON bodies: what is accepted, what is rejected, and the count of parts."""

import asyncio
import gzip
import json
import threading
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import example, given, strategies as st
from pydantic import AfterValidator, BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.client import Client
from app.http.errors.responses import register_handlers
from app.http.json_body import MAX_PARTS, MAX_PLAIN, MAX_VALUES, JsonRoute, num_parts, read_json
from tests.support.rows import rows
from tests.support.speaker import served

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
    text = "[{:" * MAX_PARTS + "," * MAX_VALUES
    text += '\\"' * MAX_PLAIN
    assert read_json(json.dumps([text, 1]).encode()) == [text, 1]


def app() -> FastAPI:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/count")
    async def count(body: dict[str, Any]) -> int:
        return len(body)

    made = FastAPI()
    register_handlers(made)
    made.include_router(router)
    return made


@rows(
    ("body", "message"),
    [
        (b"[" + b"[]," * MAX_PARTS + b"1]", f"more than {MAX_PARTS} lists, objects and members"),
        (b'{"a":' * MAX_PARTS, f"more than {MAX_PARTS} lists, objects and members"),
        (b"[1" + b",1" * MAX_VALUES + b",1]", f"more than {MAX_VALUES} values"),
        (
            b"[" + b"9" * 4096 + b"," + b" " * MAX_PLAIN + b'"a"]',
            f"more than {MAX_PLAIN} bytes beside",
        ),
        (b'["a' + b'"b' * 3 * MAX_VALUES, f"more than {MAX_VALUES} values"),
        (b"[" * 100_000, "not valid JSON: it is nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON: a number has too many digits"),
        (b'{"a": "\xff"}', "not valid JSON: it is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON: it is not UTF-8"),
        (b'{"a": 1', "not valid JSON: Expecting ',' delimiter"),
        (b"[]", "must be a JSON object"),
    ],
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


async def test_a_large_body_is_validated_elsewhere_one_at_a_time_for_each_client() -> None:
    """The event loop goes on meanwhile, and so do the bodies of other clients."""
    begun, may_go_on = threading.Event(), threading.Event()
    readers = list[str]()

    def read(value: str) -> str:
        readers.append(threading.current_thread().name)
        begun.set()
        assert may_go_on.wait(20), "the event loop waits for it"
        return value

    class Body(BaseModel):
        a: Annotated[str, AfterValidator(read)]

    router = APIRouter(route_class=JsonRoute)

    @router.post("/length")
    async def length(body: Body) -> int:
        return len(body.a)

    made = FastAPI()
    made.include_router(router)
    large = json.dumps({"a": "x" * 40_000}).encode()

    async def post(name: str) -> int:
        transport = httpx.ASGITransport(of_client(made, name))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Content-Type": "application/json"}
            return (await client.post("/length", content=large, headers=headers)).status_code

    own = [asyncio.create_task(post("a")) for _ in range(3)]
    await asyncio.to_thread(begun.wait, 20)
    assert len(readers) == 1
    begun.clear()
    other = asyncio.create_task(post("b"))
    await asyncio.to_thread(begun.wait, 20)
    may_go_on.set()
    assert await asyncio.gather(*own, other) == [200] * 4
    assert threading.current_thread().name not in readers


def of_client(app: ASGIApp, name: str) -> ASGIApp:
    async def send_as_client(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"client": Client(name)}}, receive, send)

    return send_as_client


async def test_the_first_fault_of_a_body_is_found_in_its_place() -> None:
    """With the location that FastAPI would give it, whatever the size of the body."""
    for filling in ("", "x" * 40_000):
        content = json.dumps({"prompt": [filling, {}], "model": "m"}).encode()
        async with served() as server:
            headers = {"Content-Type": "application/json"}
            answer = await server.client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
