"""The system's Chromium, driven by Playwright: for the tests of the page and for its pictures."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Containers have no namespaces for the sandbox, and little shared memory.
_ARGUMENTS: Final = ("--no-sandbox", "--disable-dev-shm-usage")


class NoBrowser(Exception):
    """There is no Chromium."""


def chromium_path() -> str:
    """Return where Chromium is: what `CHROMIUM` names, or the first in the path.

    Raises:
        NoBrowser: there is none.
    """
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise NoBrowser("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """Start a browser without windows."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium_path(), args=_ARGUMENTS)
        yield started
        started.close()
