"""The page: its headers, its size, what it loads, and where its libraries come from."""

import json
import re
from hashlib import sha256
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any, Final

import pytest
from pydantic import SecretStr, ValidationError

from app.settings import Settings
from app.web.pages import load_pages
from scripts.generated_docs import ROOT
from tests.support.speaker import served

pytestmark = pytest.mark.anyio

STATIC: Final = ROOT / "app" / "web" / "static"
VENDOR: Final = STATIC / "vendor"
# What the first view of the page takes, in bytes.
MAX_SIZE: Final = 260_000


def texts() -> dict[str, str]:
    """Return the files of the page that are ours."""
    pages = {path: page for path, page in load_pages().items() if "/vendor/" not in path}
    return {path: page.content.decode() for path, page in pages.items()}


async def test_the_page_needs_no_key_and_the_apis_do() -> None:
    async with served(api_keys=SecretStr("one")) as server:
        for path in load_pages():
            response = await server.client.get(path)
            assert response.status_code == 200, path
        assert (await server.client.get("/v1/models")).status_code == 401
        assert (await server.client.get("/web/none.js")).status_code == 401


async def test_without_the_setting_there_is_no_page() -> None:
    async with served(web=False) as server:
        # There is a `HEAD /` of Anthropic's API.
        assert (await server.client.get("/")).status_code == 405
        assert (await server.client.get("/web/main.js")).status_code == 404


async def test_nothing_can_be_loaded_from_elsewhere() -> None:
    async with served() as server:
        response = await server.client.get("/")
    policy = dict(
        directive.split(" ", 1)
        for directive in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["content-type"] == "text/html; charset=utf-8"


async def test_servers_of_tools_are_reached_only_if_a_setting_names_them() -> None:
    origins = "http://localhost:3001, https://tools.example"
    async with served(mcp_origins=origins) as server:
        policy = (await server.client.get("/")).headers["content-security-policy"]
    assert "connect-src 'self' http://localhost:3001 https://tools.example;" in policy


@pytest.mark.parametrize("origin", ["*", "https://a.example; script-src *", "a", "http://a/b"])
def test_what_is_no_origin_does_not_get_into_the_policy(origin: str) -> None:
    with pytest.raises(ValidationError, match="is no origin"):
        Settings(mcp_origins=origin)


async def test_an_unchanged_file_is_not_sent_again() -> None:
    async with served() as server:
        first = await server.client.get("/web/main.js")
        etag = first.headers["etag"]
        again = await server.client.get("/web/main.js", headers={"If-None-Match": f"W/{etag}"})
        other = await server.client.get("/web/main.js", headers={"If-None-Match": '"other"'})
        head = await server.client.head("/web/main.js")
        assert "content-security-policy" in (await server.client.head("/")).headers
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == etag
    assert (other.status_code, other.content) == (200, first.content)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(first.content))
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"


def test_no_script_and_no_style_is_inline() -> None:
    index = texts()["/"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", index)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", index))


def test_what_a_file_names_is_served() -> None:
    pages = load_pages()
    named = set(re.findall(r'(?:src|href)="(/[^"#]*)"', texts()["/"]))
    assert {"/web/main.js", "/web/style.css"} <= named
    for path, text in texts().items():
        imported = re.findall(r'(?:from|^import) "(\.[^"]+)"', text, re.MULTILINE)
        named |= {normpath(f"{dirname(path)}/{name}") for name in imported}
    assert named == set(pages) - {"/"}


def test_no_file_names_another_host() -> None:
    hosts = {
        (path, host)
        for path, text in texts().items()
        for host in re.findall(r"""["'(]\s*(?:https?:)?//([\w.-]+)""", text)
    }
    # A name of a namespace, which is not loaded.
    assert {host for _, host in hosts} <= {"www.w3.org"}


def test_no_script_writes_html_but_through_the_sanitizer() -> None:
    writers = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    assert [path for path, text in texts().items() if writers.search(text)] == []


def test_the_page_is_small() -> None:
    assert sum(len(page.content) for page in load_pages().values()) < MAX_SIZE


def vendored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VENDOR / "versions.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", vendored())
def test_libraries_are_as_they_were_published_and_come_with_their_licence(name: str) -> None:
    facts, content = vendored()[name], (VENDOR / name).read_bytes()
    assert sha256(content).hexdigest() == facts["sha256"]
    assert facts["version"] in content[:200].decode()
    assert "icense" in (VENDOR / facts["license_file"]).read_text(encoding="utf-8")


def test_every_library_is_listed() -> None:
    listed = {*vendored(), *(f["license_file"] for f in vendored().values()), "versions.json"}
    assert {path.name for path in VENDOR.iterdir()} == listed


def test_only_files_of_the_page_are_served() -> None:
    assert {Path(path).suffix for path in load_pages() if path != "/"} <= {".css", ".js", ".svg"}
