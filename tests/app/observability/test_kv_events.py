"""Events of the prefix cache on the wire, as routers read them."""

import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from app.cli import _kv_events, main
from app.main import create_app
from app.observability.kv_events import CannotPublish, KVEventPublisher
from app.settings import Settings
from batching import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from tests.support.speaker import MODEL_ID, speaking_manager

pytestmark = pytest.mark.anyio

FREE = "tcp://127.0.0.1:*"
TIMEOUT = 30_000  # milliseconds
LAST = (1 << 64) - 1
STORED = BlocksStored([LAST, 7], None, [1, 2, 3, 4], 2)


class Event(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """An event of vLLM, with nothing else."""


class BlockStored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | Cleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


@contextmanager
def publisher_on(
    endpoint: str = FREE, replay: str | None = FREE, **options: Any
) -> Iterator[KVEventPublisher]:
    with closing(KVEventPublisher(endpoint, replay, **options)) as publisher:
        yield publisher


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.linger = 0
        sock.rcvtimeo = TIMEOUT
        sock.connect(endpoint)
        yield sock


@contextmanager
def subscribed(publisher: KVEventPublisher, topic: bytes = b"") -> Iterator["zmq.Socket[bytes]"]:
    """Subscribe; nothing is lost from then on."""
    with connected(zmq.SUB, publisher.source["endpoint"]) as sock:
        sock.subscribe(topic)
        # A subscription is known when something arrives.
        while not sock.poll(20):
            publisher.publish([AllBlocksCleared()])
        yield sock


def replayed(endpoint: str, first: int = 0) -> list[tuple[bytes, int, Sequence[Event]]]:
    """Return topic, number and events of each batch that the publisher still has."""
    with connected(zmq.DEALER, endpoint) as sock:
        sock.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[tuple[bytes, int, Sequence[Event]]] = []
        while True:
            empty, topic, number, payload = sock.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return batches
            batch = DECODER.decode(payload)
            assert batch.data_parallel_rank == 0
            batches.append((topic, int.from_bytes(number, "big"), batch.events))


async def test_a_message_is_topic_number_and_batch() -> None:
    with publisher_on(topic="kv") as publisher, subscribed(publisher, b"kv") as sock:
        publisher.publish([STORED, BlocksRemoved([LAST]), AllBlocksCleared()])
        numbers = []
        events: Sequence[Event] = []
        while len(events) < 3:
            topic, number, payload = sock.recv_multipart()
            events = DECODER.decode(payload).events
            assert (topic, len(number)) == (b"kv", 8)
            numbers.append(int.from_bytes(number, "big"))
        raw = msgspec.msgpack.decode(payload)
    assert numbers == [*range(numbers[0], numbers[-1] + 1)]
    assert raw == [
        raw[0],
        [
            {
                "type": "BlockStored",
                "block_hashes": [LAST, 7],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [LAST], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    assert isinstance(raw[0], float)


async def test_who_comes_late_is_told_of_what_is_kept() -> None:
    with publisher_on(topic="t", buffer_steps=3) as publisher:
        for i in range(5):
            publisher.publish([BlocksRemoved([i])])
        while (found := replayed(publisher.source["replay_endpoint"]))[-1:] != [
            (b"t", 4, [BlockRemoved([4], "GPU")])
        ]:
            pass
        later = replayed(publisher.source["replay_endpoint"], 4)
        none = replayed(publisher.source["replay_endpoint"], 5)
    assert [number for _, number, _ in found] == [2, 3, 4]
    assert [number for _, number, _ in later] == [4]
    assert none == []


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b"\0" * 7], [b"x", b"\0" * 8], [b"", b"\0" * 8, b""], [b"\0" * 8]]
)
async def test_what_asks_for_no_replay_is_ignored(frames: list[bytes]) -> None:
    with publisher_on() as publisher:
        endpoint = publisher.source["replay_endpoint"]
        with connected(zmq.DEALER, endpoint) as sock:
            sock.send_multipart(frames)
            sock.send_multipart([b"", b"\0" * 8])
            # The first answer is that to the second request.
            assert sock.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        assert replayed(endpoint) == []


async def test_where_the_thread_falls_behind_all_blocks_are_cleared() -> None:
    class Slow(list[CacheEvent]):
        """Events that are read when the test says so."""

        def __iter__(self) -> Iterator[CacheEvent]:
            has_begun.set()
            may_go_on.wait()
            return super().__iter__()

    has_begun, may_go_on = threading.Event(), threading.Event()
    with publisher_on(buffer_steps=20_000) as publisher:
        publisher.publish(Slow([BlocksRemoved([0])]))
        assert has_begun.wait(TIMEOUT)
        # More than wait, and more than the pipe holds that wakes the thread.
        for i in range(1, 70_001):
            publisher.publish([BlocksRemoved([i])])
        may_go_on.set()
        endpoint = publisher.source["replay_endpoint"]
        while not (last := replayed(endpoint, 10_000)):
            pass
        first, second, third, *_ = (events for _, _, events in replayed(endpoint))
    assert first == [BlockRemoved([0], "GPU")]
    assert second == [Cleared(), BlockRemoved([60_001], "GPU")]
    assert third == [BlockRemoved([60_002], "GPU")]
    assert last == [(b"", 10_000, [BlockRemoved([70_000], "GPU")])]


async def test_the_last_events_are_published_and_none_after_the_end() -> None:
    publisher = KVEventPublisher(FREE)
    assert publisher.source["replay_endpoint"] is None
    with subscribed(publisher) as sock:
        publisher.publish([STORED])
        publisher.close()
        publisher.publish([BlocksRemoved([1])])
        while not isinstance(DECODER.decode(sock.recv_multipart()[2]).events[0], BlockStored):
            pass
        assert not sock.poll(0)


async def test_an_endpoint_in_use_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        for endpoints in ((taken, None), (FREE, taken)):
            with pytest.raises(CannotPublish) as raised:
                KVEventPublisher(*endpoints)
            assert str(raised.value) == f"cannot listen on {taken}: Address already in use"


async def test_endpoints_are_named_with_the_ports_that_they_have(tmp_path: Any) -> None:
    path = f"ipc://{tmp_path}/events"
    with publisher_on("tcp://*:0", path, topic="t", buffer_steps=5) as publisher:
        source = dict(publisher.source)
    host, _, port = source.pop("endpoint").rpartition(":")
    assert host == "tcp://*"
    assert int(port) > 0
    assert source == {
        "publisher": "zmq",
        "enable_kv_cache_events": True,
        "replay_endpoint": path,
        "buffer_steps": 5,
        "hwm": 5,
        "topic": "t",
    }


async def ask(client: httpx.AsyncClient, model: str, **fields: Any) -> None:
    body = {"model": model, "prompt": "a" * 70, "max_tokens": 1, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.is_success, answer.text


async def test_the_default_models_blocks_are_published_while_it_is_loaded() -> None:
    settings = Settings.model_construct(kv_events=FREE, kv_events_replay=FREE)
    manager = speaking_manager(model_ids=(MODEL_ID, "other"), num_blocks=64)
    with _kv_events(settings, manager) as source:
        assert source is not None
        app = create_app(manager, settings, kv_events=source)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = (await client.get("/kv_event_sources")).json()
            await ask(client, "other")
            await ask(client, MODEL_ID)
            await ask(client, MODEL_ID, cache_salt="mine")
        manager.close()
        endpoint = found["0"]["replay_endpoint"]
        while len(batches := replayed(endpoint)) < 3:
            pass
        app.state.service.images.close()
    assert found == {"0": source}
    before, (stored,), after = [events for _, _, events in batches]
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash is None
    assert stored.token_ids == [ord("a")] * 64
    assert stored.block_size == 32
    assert len(stored.block_hashes) == 2
    assert before == after == [Cleared()]


async def test_without_events_there_are_no_sources() -> None:
    manager = speaking_manager()
    with _kv_events(Settings.model_construct(), manager) as source:
        app = create_app(manager, kv_events=source)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/kv_event_sources")).json() == {}
    manager.close()
    app.state.service.images.close()


def test_without_the_packages_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "app.observability.kv_events")
    flags = ["--kv-events=tcp://127.0.0.1:0", "--port=0", f"--data-dir={tmp_path}"]
    assert main(flags) == 2
    assert capsys.readouterr().err == (
        "--kv-events: the packages for it are not installed: pip install pyzmq msgspec\n"
    )


def test_an_endpoint_that_cannot_be_used_ends_the_start_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    endpoint = f"ipc://{tmp_path}/none/events"
    flags = [f"--kv-events={endpoint}", "--port=0", f"--data-dir={tmp_path}"]
    assert main(flags) == 2
    assert capsys.readouterr().err == (
        f"--kv-events: cannot listen on {endpoint}: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("endpoint", "is_open"), [("tcp://*:0", True), ("tcp://127.0.0.1:0", False), ("ipc://a", False)]
)
def test_the_start_warns_if_others_can_read_prompts(
    endpoint: str,
    is_open: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "app.observability.kv_events")
    flags = [f"--kv-events={endpoint}", f"--kv-events-replay={endpoint}"]
    main([*flags, "--port=0", f"--data-dir={tmp_path}"])
    warning = f"warning: all that reach {endpoint} can read prompts: it asks for no key\n"
    assert capsys.readouterr().err.count(warning) == 2 * is_open
