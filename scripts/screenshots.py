"""`make screenshots`: the pictures of the page in README.md, of the bundled model at work.

Runs in the environment of the page's tests; `SERVER_PYTHON` is the interpreter that has the
server's packages.
"""

import base64
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

from scripts.browser import browser
from scripts.server_process import MODEL, ROOT, Server

ASSETS: Final = ROOT / "docs" / "assets"
MAX_SIZE: Final = 150_000

_VIEWPORT: Final = {"width": 1200, "height": 800}
_QUALITY: Final = 82
# Conversations, of which the last one is shown.
_QUESTIONS: Final = (
    ("Name three primary colors.",),
    ("What is a KV cache?",),
    (
        "Can you tell me the capital of France?",
        "Write a short Python function that adds two numbers.",
    ),
)
# Few blocks for many requests with a common beginning: all that the map shows is there.
_SETTINGS: Final[dict[str, Any]] = {"num_blocks": "132", "max_num_seqs": "8"}
_BEGINNING: Final = "You are a patient teacher who explains everything with a long story. " * 14
_TOPICS: Final = (
    *("rivers", "bridges", "bread", "stars", "trains", "whales", "paper", "glass", "maps", "tides"),
    *("clocks", "honey", "volcanoes", "ships", "music", "snow", "roads", "gold", "wool", "light"),
    *("salt", "wind", "tea", "forests", "islands", "lamps", "silk", "wheels", "deserts", "rain"),
)
_MILLISECONDS_BETWEEN: Final = 330


def main(arguments: Sequence[str]) -> int:
    """Write the pictures; return the exit status."""
    if arguments:
        print(__doc__)
        return 2
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    with Server(python=python, **_SETTINGS) as server, browser() as chromium:
        shown = {"viewport": _VIEWPORT, "device_scale_factor": 1.5}
        chat = chromium.new_page(color_scheme="light", **shown)
        chat.goto(server.url)
        for questions in _QUESTIONS:
            chat.locator("#new-chat").click()
            for question in questions:
                chat.locator("#prompt").fill(question)
                chat.keyboard.press("Enter")
                chat.locator(".message.assistant").last.wait_for()
                chat.locator(".streaming").wait_for(state="detached", timeout=120_000)
        chat.locator("#prompt").blur()
        chat.mouse.move(*_VIEWPORT.values())
        _write(chat, ASSETS / "chat.webp")
        chat.close()
        room = chromium.new_page(color_scheme="dark", **shown)
        room.goto(f"{server.url}/#room")
        room.locator("#room").blur()
        with ThreadPoolExecutor(len(_TOPICS)) as pool:
            for i, topic in enumerate(_TOPICS):
                pool.submit(_ask, server.url, i, topic)
                room.wait_for_timeout(_MILLISECONDS_BETWEEN)
            _write(room, ASSETS / "machine-room.webp")
            server.kill()
    return 0


def _ask(url: str, number: int, topic: str) -> None:
    """Send a request of a load with three priorities and prompts of different lengths."""
    body = {
        "model": MODEL,
        "max_tokens": 320 + 60 * (number % 4),
        "ignore_eos": True,
        "priority": ("normal", "low", "normal", "high")[number % 4],
        "messages": [
            {"role": "system", "content": _BEGINNING},
            {"role": "user", "content": f"Tell me about {topic}. " * (1 + 16 * (number % 3))},
        ],
    }
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    # The server ends before the last of them do.
    with suppress(OSError, HTTPException):
        urlopen(Request(f"{url}/v1/chat/completions", data, headers)).close()


def _write(page: Any, path: Path) -> None:
    """Write a WebP, which Playwright itself does not offer."""
    session = page.context.new_cdp_session(page)
    options = {"format": "webp", "quality": _QUALITY}
    picture = base64.b64decode(session.send("Page.captureScreenshot", options)["data"])
    if len(picture) > MAX_SIZE:
        raise ValueError(f"{path.name} has {len(picture)} bytes, and {MAX_SIZE} are allowed")
    path.write_bytes(picture)
    print(f"{path.relative_to(ROOT)}: {len(picture)} bytes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
