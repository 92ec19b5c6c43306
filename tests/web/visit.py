"""A visit to the page: what a user does there, and what must not happen meanwhile."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from scripts.server_process import Server

DESKTOP: Final = {"width": 1280, "height": 800}
PHONE: Final = {"width": 360, "height": 640}
NAMELESS: Final = re.compile(
    r"^\s*- (?:button|link|textbox|combobox|checkbox|spinbutton|dialog)(?:$|:| \[)", re.MULTILINE
)


def scripted_server(**settings: Any) -> Server:
    """Start a server whose model does what the prompt says.

    `SERVER_PYTHON` is the interpreter that has the server's packages.
    """
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    return Server(("-m", "tests.support.scripted_server"), python=python, **settings)


@dataclass
class Visit:
    """A page of a browser; `problems` are errors in it, and requests to other hosts."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)
    _expected: list[str] = field(default_factory=list)

    def open(self, fragment: str = "") -> None:
        self.page.goto(f"{self.url}/{fragment}")

    def expect_problem(self, pattern: str) -> None:
        """Say that the test itself causes some."""
        self._expected.append(pattern)

    @property
    def unexpected_problems(self) -> list[str]:
        return [p for p in self.problems if not any(re.search(e, p) for e in self._expected)]

    # What is on it.

    @property
    def last(self) -> Any:
        """The last message."""
        return self.page.locator(".message").last

    @property
    def text(self) -> Any:
        """The text of the last message."""
        return self.last.locator(".markdown")

    @property
    def fault(self) -> Any:
        return self.last.locator(".fault")

    # What a user does.

    def send(self, text: str) -> None:
        self.page.get_by_role("textbox", name="Message").fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> None:
        """Send a message and wait for the end of its response."""
        self.send(text)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        self.page.locator(".message.assistant").last.wait_for()
        self.page.locator(".streaming").wait_for(state="detached")

    def count(self) -> None:
        """Let the model count for a while, and return when it has begun."""
        self.send("[[count]]")
        self.wait_for_text("0 1 2 3")

    def wait_for_text(self, text: str) -> None:
        self.text.filter(has_text=text).wait_for()


@contextmanager
def new_visit(chromium: Any, url: str, **options: Any) -> Iterator[Visit]:
    """Open a page in a profile of its own; fail at the end if there were problems."""
    context = chromium.new_context(viewport=options.pop("viewport", DESKTOP), **options)
    visit = Visit(context.new_page(), url)
    page, host = visit.page, urlsplit(url).netloc

    def on_request(request: Any) -> None:
        # `data:` and `blob:` are loaded from nowhere.
        if urlsplit(request.url).netloc not in ("", host):
            visit.problems.append(f"request to {request.url}")

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            visit.problems.append(message.text)

    page.on("request", on_request)
    page.on("console", on_console)
    page.on("pageerror", lambda error: visit.problems.append(str(error)))
    page.set_default_timeout(20_000)
    visit.open()
    yield visit
    context.close()
    assert not visit.unexpected_problems, visit.unexpected_problems
