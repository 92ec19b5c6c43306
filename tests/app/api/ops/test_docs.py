"""The page of the API shows all of it, runs nothing, and loads nothing."""

import re
import threading
from html.parser import HTMLParser
from typing import Any

import pytest

from app.api.ops.docs import _page
from tests.support.speaker import served


class Elements(HTMLParser):
    """The tags of a page, and what their attributes refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]


@pytest.mark.anyio
async def test_it_shows_every_operation_and_schema() -> None:
    async with served() as server:
        page = (await server.client.get("/docs")).text
        document = (await server.client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/messages", "/metrics"} <= document["paths"].keys()
    for name in (*document["paths"], *document["components"]["schemas"]):
        assert f"<code>{name}</code>" in page


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_it_is_made_in_a_worker_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time it takes seconds, in which the event loop would serve no other request."""
    threads: list[int] = []
    async with served() as server:
        make = server.app.openapi

        def openapi() -> dict[str, Any]:
            threads.append(threading.get_ident())
            return make()

        monkeypatch.setattr(server.app, "openapi", openapi)
        assert (await server.client.get(path)).status_code == 200
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.anyio
async def test_it_runs_nothing_and_loads_nothing() -> None:
    async with served() as server:
        response = await server.client.get("/docs")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "script" not in policy
    elements = Elements(response.text)
    assert elements.references == ["openapi.json"]
    assert not elements.tags & {"script", "link", "img", "iframe", "object", "embed", "form"}
    assert not any(name.startswith("on") for name in elements.attributes)
    assert not re.search(r"url\(|@import", response.text)


@pytest.mark.anyio
async def test_there_is_no_other_page_of_the_framework() -> None:
    async with served() as server:
        for path in ("/redoc", "/docs/oauth2-redirect"):
            assert (await server.client.get(path)).status_code == 404


def test_text_of_the_document_is_no_html() -> None:
    evil = "<script>alert(1)</script>"
    operation = {"description": evil, "parameters": [{"name": evil}]}
    page = _page(
        {
            "info": {"title": evil},
            "paths": {f"/{evil}": {"get": operation, "head": {}}},
            "components": {"schemas": {f'"{evil}': {"title": evil}}},
        }
    )
    assert "<script" not in page
    assert not Elements(page).tags & {"script"}
    assert "<h2>Schemas</h2>" in _page({"info": {"title": "a"}, "paths": {}})
