"""What reads the events of the prefix cache: vllm-router's policy `kv_aware`, and Dynamo's selection of workers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Final

import httpx
import pytest
import zmq
from dynamo.llm import SelectionService  # type: ignore[import-not-found]

from scripts.cluster.replica import Replica
from scripts.cluster.router import VllmRouter
from scripts.server_process import wait_until
from tests.support.clusters import TIMEOUT

BLOCK_SIZE: Final = 32
# More than one prompt fills, and less than two.
NUM_BLOCKS: Final = 24
END: Final = b"\xff" * 8


def start(model: Path, folder: Path, name: str, **settings: str) -> Replica:
    shared = {"model": str(model), "cpu_threads": "1", **settings}
    ports = {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "tcp://127.0.0.1:*"}
    replica = Replica(name, folder, shared | ports)
    replica.start()
    return replica


def source(replica: Replica) -> dict[str, Any]:
    """Return where the events of a replica are published."""
    (found,) = replica.get("/kv_event_sources").values()
    return dict(found)


def num_messages(replica: Replica) -> int:
    """Return how many messages a replica has published."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger, sock.rcvtimeo = 0, int(1000 * TIMEOUT)
        sock.connect(source(replica)["replay_endpoint"])
        sock.send_multipart([b"", bytes(8)])
        found = 0
        while sock.recv_multipart()[2] != END:
            found += 1
        return found


def prompt_of(word: str, num_words: int = 100) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{word} " * num_words}]
    return {"model": "small", "messages": messages, "max_tokens": 1}


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(url + path, json=body, timeout=TIMEOUT).raise_for_status().json()


def num_cached(url: str, body: dict[str, Any]) -> int:
    """Return how many full blocks of a prompt were in the cache of the server that has answered it."""
    usage = post(url, "/v1/chat/completions", body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"]) // BLOCK_SIZE


def tokens_of(replica: Replica, body: dict[str, Any]) -> list[int]:
    return list(post(replica.url, "/v1/chat/completions/render", body)["token_ids"])


def num_full(replica: Replica, body: dict[str, Any]) -> int:
    return len(tokens_of(replica, body)) // BLOCK_SIZE


@pytest.fixture(scope="module")
def replicas(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Replica]]:
    folder = tmp_path_factory.mktemp("replicas")
    with start(model, folder, "1") as first, start(model, folder, "2") as second:
        for replica in (first, second):
            replica.wait_until_ready()
        yield first, second


@pytest.fixture
def small(model: Path, tmp_path: Path) -> Iterator[Replica]:
    with start(model, tmp_path, "small", num_blocks=str(NUM_BLOCKS)) as replica:
        replica.wait_until_ready()
        yield replica


@pytest.fixture(scope="module")
def router(
    replicas: Sequence[Replica], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmRouter]:
    # The log says what it has read.
    options = ["--policy", "kv_aware", "--log-level", "debug"]
    options += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", "small"]
    for replica in replicas:
        found = source(replica)
        options += ["--kv-event-source", f"{replica.url}={found['endpoint']}"]
        options += ["--kv-event-replay-source", f"{replica.url}={found['replay_endpoint']}"]
    urls = [replica.url for replica in replicas]
    with VllmRouter(urls, tmp_path_factory.mktemp("router"), options=options) as started:
        started.start()
        started.wait_until_ready()
        yield started


def wait_until_read(router: VllmRouter, replicas: Iterable[Replica]) -> None:
    """Wait until the router has read all messages of the replicas.

    It asks for those that it has missed when it gets one, for which it must have subscribed.
    """
    numbers = count()

    def has_read(replica: Replica) -> bool:
        num_cached(replica.url, prompt_of(f"message{next(numbers)}", 20))
        line = f"sequence advanced source={replica.url} rank=0 seq={num_messages(replica) - 1}"
        return any(line in _plain(router.log) for _ in range(100))

    for replica in replicas:
        wait_until(partial(has_read, replica), f"it has not read all: {router.log}")


def _plain(log: Path) -> str:
    """Return a log without colours."""
    text = log.read_text(encoding="utf-8")
    return "".join(part.partition("m")[2] for part in f"\x1b[m{text}".split("\x1b[")[1:])


def place(replicas: Sequence[Replica], words: str) -> list[tuple[Replica, dict[str, Any]]]:
    """Have the replicas answer prompts in turn, without the router; return who has which."""
    placed = [(replicas[i % 2], prompt_of(word)) for i, word in enumerate(words.split())]
    for replica, prompt in placed:
        assert num_cached(replica.url, prompt) == 0
    return placed


def check_routed(router: VllmRouter, placed: Iterable[tuple[Replica, dict[str, Any]]]) -> None:
    """Check that each prompt goes to the replica that has it."""
    for replica, prompt in placed:
        assert num_cached(router.url, prompt) == num_full(replica, prompt)


def test_a_prompt_goes_to_the_replica_that_has_its_beginning(
    router: VllmRouter, replicas: Sequence[Replica]
) -> None:
    placed = place(replicas, "red blue green grey black white")
    wait_until_read(router, replicas)
    check_routed(router, placed)


def test_a_router_that_is_started_again_asks_for_what_it_has_missed(
    router: VllmRouter, replicas: Sequence[Replica]
) -> None:
    router.kill()
    placed = place(replicas, "gold silver copper iron tin lead")
    router.start()
    router.wait_until_ready()
    wait_until_read(router, replicas)
    check_routed(router, placed)


def worker(replica: Replica) -> dict[str, Any]:
    found = source(replica)
    return {
        "worker_id": 1,
        "model_name": "small",
        "endpoint": replica.url,
        "kv_events_endpoint": found["endpoint"],
        "replay_endpoint": found["replay_endpoint"],
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 512,
    }


async def num_known(service: SelectionService, tokens: Sequence[int]) -> int:
    """Return how many leading blocks of a prompt Dynamo believes to be in the worker's cache."""
    scores = await service.overlap_scores({"model_name": "small", "token_ids": [*tokens]})
    (found,) = scores["workers"]
    return int(found["device_blocks"])


async def wait_for(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = monotonic() + TIMEOUT
    while not await condition():
        assert monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def knows(service: SelectionService, tokens: Sequence[int], num_blocks: int) -> None:
    """Wait until Dynamo knows exactly so many blocks of a prompt."""

    async def has_them() -> bool:
        return await num_known(service, tokens) == num_blocks

    await wait_for(has_them, f"it does not know {num_blocks} blocks")


def test_dynamo_knows_the_blocks_that_are_stored_and_those_before_it_came(
    replicas: Sequence[Replica],
) -> None:
    replica = replicas[0]

    async def run() -> None:
        first, late = prompt_of("north"), prompt_of("south")
        tokens = tokens_of(replica, first)
        service = SelectionService(indexer_threads=1)
        try:
            await service.upsert_worker(worker(replica))
            num_cached(replica.url, first)
            await knows(service, tokens, num_full(replica, first))
            for num_blocks in range(num_full(replica, first)):
                prefix = tokens[: num_blocks * BLOCK_SIZE + 31]
                assert await num_known(service, prefix) == num_blocks
            changed = [*tokens[:100], tokens[100] + 1, *tokens[101:]]
            assert await num_known(service, changed) == 3
            assert await num_known(service, tokens_of(replica, late)) == 0
        finally:
            service.shutdown()
        second = SelectionService(indexer_threads=1)
        try:
            await second.upsert_worker(worker(replica))
            num_cached(replica.url, late)
            await knows(second, tokens, num_full(replica, first))
            await knows(second, tokens_of(replica, late), num_full(replica, late))
        finally:
            second.shutdown()

    asyncio.run(run())


def test_dynamo_knows_what_is_removed(small: Replica) -> None:
    first, second = prompt_of("east"), prompt_of("west")
    num_blocks = num_full(small, first)
    assert num_blocks < NUM_BLOCKS < 2 * num_blocks

    async def run() -> None:
        tokens = tokens_of(small, first), tokens_of(small, second)
        service = SelectionService(indexer_threads=1)
        try:
            await service.upsert_worker(worker(small))
            num_cached(small.url, first)
            await knows(service, tokens[0], num_blocks)
            num_cached(small.url, second)
            await knows(service, tokens[1], num_full(small, second))
            left = await num_known(service, tokens[0])
            assert 0 < left < num_blocks
            assert num_cached(small.url, first) == left
            post(small.url, "/models/unload", {"model": "small"})
            await knows(service, tokens[0], 0)
            assert await num_known(service, tokens[1]) == 0
        finally:
            service.shutdown()

    asyncio.run(run())
