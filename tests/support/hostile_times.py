"""How long hostile requests take, and how long others wait meanwhile.

`python -m tests.support.hostile_times` starts a server and sends it all of them, one by one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import perf_counter
from typing import Final

from scripts.server_process import Server
from tests.support.hostile.apis import CHAT, Attacks, chat
from tests.support.hostile.forged import forged
from tests.support.hostile.grammars import cheap, grammars
from tests.support.hostile.json_bodies import json_bodies
from tests.support.hostile.numbers import too_much
from tests.support.hostile.sizes import sizes
from tests.support.hostile.texts import surrogates
from tests.support.hostile.wire import exchange, head, post

_NUM_SHOWN: Final = 15


def attacks() -> Attacks:
    return too_much() | json_bodies() | surrogates() | forged() | grammars() | cheap() | sizes()


@contextmanager
def watching(address: tuple[str, int]) -> Iterator[list[float]]:
    """Ask again and again how the server is; the list has the longest wait."""
    longest, is_over = [0.0], Event()

    def ask() -> None:
        while not is_over.wait(0.005):
            began = perf_counter()
            exchange(address, head("GET", "/health"))
            longest[0] = max(longest[0], perf_counter() - began)

    thread = Thread(target=ask)
    thread.start()
    try:
        yield longest
    finally:
        is_over.set()
        thread.join()


def main() -> None:
    with Server() as server:
        address = server.address()
        exchange(address, post(CHAT, chat()))
        rows = []
        for name, attack in attacks().items():
            request = attack.request()
            with watching(address) as longest:
                began = perf_counter()
                answer = exchange(address, request)
                seconds = perf_counter() - began
            rows.append((seconds, longest[0], f"{answer.status} {name}"))
    for title, column in (("took longest", 0), ("held up others longest", 1)):
        sys.stdout.write(f"of {len(rows)} requests these {title}, in ms:\n")
        for row in sorted(rows, key=lambda row: -float(row[column]))[:_NUM_SHOWN]:
            sys.stdout.write(f"{1000 * float(row[column]):8.0f}  {row[2]}\n")


if __name__ == "__main__":
    main()
