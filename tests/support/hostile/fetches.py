"""Addresses that the server may not ask for on a client's behalf."""

from functools import partial
from typing import Any

from tests.support.hostile.apis import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Attacks,
    Body,
    asking,
    chatting,
    items,
    message,
    part,
    to,
    tool,
)
from tests.support.hostile.grammars import structured


def fetches(url: str) -> Attacks:
    """Return requests that name a URL wherever another server might go and get it."""
    return (
        to(CHAT, _of_chats(url))
        | to(MESSAGES, _of_messages(url))
        | to(RESPONSES, _of_responses(url))
    )


def _of_chats(url: str) -> dict[str, Body]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_data": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    return {
        **{f"part {i}": chatting([part]) for i, part in enumerate(parts)},
        "model": chatting(model=url),
        "template": chatting(chat_template=url),
        "tokenizer": chatting(chat_template_kwargs={"tokenizer_kwargs": {"name": url}}),
        "$ref": structured(json={"$ref": url}),
        "$schema": structured(json={"$schema": url}),
        "$id": structured(json={"$id": url, "$ref": "other.json"}),
        "$dynamicRef": structured(json={"$dynamicRef": url}),
        "definitions": structured(json={"properties": {"x": {"$ref": f"{url}#/a"}}}),
        "grammar": structured(grammar=f'start: %json {{"$ref": "{url}"}}'),
        "import": structured(grammar=f"%import {url}\nstart: WS"),
        "tool": chatting(
            tools=[tool(parameters={"properties": {"x": {"$ref": url}}})], tool_choice="required"
        ),
        "response_format": chatting(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": url}},
            }
        ),
    }


def _of_messages(url: str) -> dict[str, Body]:
    source = {"type": "url", "url": url}
    return {
        **{
            kind: partial(message, [{"type": kind, "source": source}])
            for kind in ("image", "document", "search_result", "container_upload")
        },
        "a result's image": partial(
            message,
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "image", "source": source}],
                }
            ],
        ),
        "schema": lambda: message(
            tools=[{"name": "f", "input_schema": {"properties": {"x": {"$ref": url}}}}],
            tool_choice={"type": "any"},
        ),
        "format": lambda: message(
            output_config={"format": {"type": "json_schema", "schema": {"$ref": url}}}
        ),
        "servers": lambda: message(mcp_servers=[{"type": "url", "url": url, "name": "x"}]),
        "model": lambda: message(model=url),
    }


def _of_responses(url: str) -> dict[str, Body]:
    schema = {"type": "json_schema", "name": "x", "schema": {"$ref": url}}
    return {
        "image": items(part(type="input_image", image_url=url)),
        "file": items(part(type="input_file", file_url=url)),
        "format": asking(text={"format": schema}),
        "model": asking(model=url),
    }
