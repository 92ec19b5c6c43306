"""Two servers on one folder of keys and values, which is always full, and one of them is killed again and again.

`SHARED_STORE_SECONDS=600 pytest -m slow tests/reliability/test_shared_store.py` takes ten minutes.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Final

import pytest

from batching import check_caches
from scripts.server_process import Address, Server
from scripts.soak.client import CHAT, Outcome, ask, ask_all
from scripts.soak.gauges import gauges
from tests.support.live import ask_golden, live_server

SECONDS: Final = float(os.environ.get("SHARED_STORE_SECONDS", "20"))

# A fifth of what the prompts have.
MAX_BYTES: Final = 2 << 20
SETTINGS: Final = {
    "kv_cache_gib": str(MAX_BYTES / (1 << 30)),
    "num_blocks": "96",
    "max_model_len": "2048",
}
# Between two kills.
NUM_ROUNDS: Final = 6
NUM_REQUESTS: Final = 8
# A thousand tokens each, since a token is a byte.
DOCUMENTS: Final = tuple(
    " ".join(f"Page {i} of book {book} says {(i * 37 + book) % 101}." for i in range(32))
    for book in range(6)
)
PRIORITIES: Final = ("high", "normal", "low")


def prompts() -> list[dict[str, Any]]:
    """Return requests of conversations that share their beginnings, one with another or with its own next turn."""
    made: list[dict[str, Any]] = []
    for book, document in enumerate(DOCUMENTS):
        text = document
        for turn in range(4):
            text = f"{text} And {turn} of {book}, what of page {turn * 5}?"
            messages = [{"role": "user", "content": text}]
            made.append({"messages": messages, "temperature": 0, "max_tokens": 12})
    return made


class Traffic:
    """Asks what has one right answer: that of a server without a store."""

    def __init__(self) -> None:
        self._bodies = prompts()
        with live_server(**SETTINGS) as server:
            alone = asyncio.run(ask_all(server.address(), CHAT, self._bodies))
            assert all(each.is_complete for each in alone)
            assert server.stop() == 0
        self._expected = [each.text for each in alone]
        self._rng = random.Random(3)
        self.num_right = 0

    def draw(self) -> list[int]:
        return self._rng.choices(range(len(self._bodies)), k=NUM_REQUESTS)

    def body(self, index: int) -> dict[str, Any]:
        priority = self._rng.choice(PRIORITIES)
        return {**self._bodies[index], "priority": priority, "stream": self._rng.random() < 0.5}

    def check(self, asked: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Check answers that have come to their ends."""
        for index, outcome in zip(asked, outcomes, strict=True):
            assert outcome.is_complete, str(outcome)
            assert outcome.text == self._expected[index]
        self.num_right += len(asked)

    async def ask(self, *addresses: Address) -> None:
        """Ask servers many things at once."""
        asked = [self.draw() for _ in addresses]
        outcomes = await asyncio.gather(
            *(
                ask_all(address, CHAT, list(map(self.body, indices)))
                for address, indices in zip(addresses, asked, strict=True)
            )
        )
        for indices, found in zip(asked, outcomes, strict=True):
            self.check(indices, found)

    async def ask_while_one_is_killed(self, other: Address, victim: Server) -> None:
        """Whatever answer of the victim is whole is right."""
        asked, address = self.draw(), victim.address()
        heads, last = count(), self._rng.randrange(NUM_REQUESTS)

        def on_head(_: Outcome) -> None:
            if next(heads) == last:
                victim.send_signal(signal.SIGKILL)

        asking = (ask(address, CHAT, self.body(index), on_head=on_head) for index in asked)
        outcomes, _ = await asyncio.gather(asyncio.gather(*asking), self.ask(other))
        whole = [i for i, outcome in enumerate(outcomes) if outcome.is_complete]
        self.check([asked[i] for i in whole], [outcomes[i] for i in whole])
        assert victim.wait() == -signal.SIGKILL


def size_of(folder: Path) -> int:
    """Return the bytes of all files; some may go meanwhile."""

    def sizes() -> Iterator[int]:
        for path in folder.rglob("*"):
            try:
                yield path.lstat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue

    return sum(sizes())


def put_foreign_files(folder: Path) -> dict[Path, bytes]:
    """Put files among those of the store that are none of its own."""
    (model,) = [path.parent for path in folder.glob("*/lock")]
    (first, *_) = sorted(model.glob("??/"))
    paths = [folder / "notes.txt", model / "photo.block", first / ".part.1", first / "x.state"]
    for path in paths:
        path.write_bytes(path.name.encode() * 99)
        os.utime(path, (0, 0))
    return {path: path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_two_servers_share_a_folder_and_one_is_killed_again_and_again(tmp_path: Path) -> None:
    traffic, store = Traffic(), tmp_path / "store"
    num_kills, num_read, most = 0, 0.0, 0

    def start() -> Server:
        return stack.enter_context(live_server(kv_cache_dir=str(store), **SETTINGS))

    with ExitStack() as stack:
        servers = [start(), start()]
        asyncio.run(traffic.ask(*(each.address() for each in servers)))
        foreign = put_foreign_files(store)
        until = monotonic() + SECONDS
        while monotonic() < until:
            for _ in range(NUM_ROUNDS):
                asyncio.run(traffic.ask(*(each.address() for each in servers)))
                most = max(most, size_of(store))
            for each in servers:
                assert asyncio.run(ask_golden(each.address())) == []
            number = num_kills % 2
            victim, other = servers[number], servers[1 - number].address()
            num_read += hit_tokens(victim)
            asyncio.run(traffic.ask_while_one_is_killed(other, victim))
            assert "is damaged" not in victim.log
            num_kills += 1
            servers[number] = start()
        num_read += sum(map(hit_tokens, servers))
        for each in servers:
            assert each.stop() == 0
            assert not [word for word in ("Traceback", "is damaged") if word in each.log]
    assert num_kills
    assert num_read > 0
    # Each counts the other's files when there is no room by its own count.
    assert MAX_BYTES / 2 < most < 1.5 * MAX_BYTES
    assert size_of(store) < 1.5 * MAX_BYTES
    assert {path: path.read_bytes() for path in foreign} == foreign
    checked = list(check_caches(store))
    assert [each for each in checked if each.problem] == []
    assert checked
    sys.stdout.write(
        f"{traffic.num_right} right answers, {num_kills} kills, {num_read:.0f} tokens read, "
        f"{most / MAX_BYTES:.2f} of the limit at most\n"
    )


def hit_tokens(server: Server) -> float:
    return asyncio.run(gauges(server.address()))["mlx_server:kv_store_hit_tokens_total"]
