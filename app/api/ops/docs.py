"""`GET /openapi.json`, and `GET /docs`: the same as a page, without a script and with nothing from elsewhere.

Both run in a worker thread: to make the document takes seconds, the first time.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from app.api.schemas.errors import ERROR_RESPONSES

router = APIRouter(responses=ERROR_RESPONSES)

# A part of the document.
_Part = Mapping[str, Any]

# There is no script, so no text in the document could become one.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STYLE: Final = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem }
summary { cursor: pointer; padding: .3rem 0 }
summary b { display: inline-block; min-width: 4.5rem }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8884 }
"""


@router.get("/openapi.json", response_class=JSONResponse, include_in_schema=False)
def get_document(request: Request) -> JSONResponse:
    """Return every operation and every schema, for programs."""
    return JSONResponse(request.app.openapi())


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
def show_document(request: Request) -> HTMLResponse:
    """Return every operation with its parameters, and every schema."""
    return HTMLResponse(_page(request.app.openapi()), headers=_HEADERS)


def _page(document: _Part) -> str:
    title = escape(document["info"]["title"])
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: API</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        '<p>The same as a document for programs: <a href="openapi.json">openapi.json</a>.</p>',
        "<h2>Operations</h2>",
        *_operations(document["paths"]),
        "<h2>Schemas</h2>",
        *_schemas(document.get("components", {}).get("schemas", {})),
    ]
    return "\n".join(parts)


def _operations(paths: _Part) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code>"
            yield f"<details><summary>{head}</summary>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            for name in ("parameters", "requestBody", "responses"):
                if name in operation:
                    yield f"<h4>{name}</h4>{_json(operation[name])}"
            yield "</details>"


def _schemas(schemas: _Part) -> Iterator[str]:
    for name, schema in schemas.items():
        code = f"<code>{escape(name)}</code>"
        yield f'<details id="{escape(name)}"><summary>{code}</summary>{_json(schema)}</details>'


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
