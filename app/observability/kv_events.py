"""Events of the prefix cache, published as vLLM 0.32 does, for routers that send a prompt where its beginning is cached.

Importing this needs pyzmq and msgspec, the extra `kv-events`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq

from batching import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

# The pool's blocks count as those of a GPU wherever they are: routers know no other that is nearest.
_MEDIUM: Final = "GPU"
_RANK: Final = 0
_END_OF_REPLAY: Final = (-1).to_bytes(8, signed=True)
# Batches that wait for the thread; it takes them in microseconds.
_MAX_QUEUED: Final = 10_000
# Of what subscribers and those who ask for a replay send.
_MAX_MESSAGE: Final = 1024
# For the last events, at the end.
_LINGER_MS: Final = 500


class CannotPublish(Exception):
    """An endpoint is invalid or in use; the message is one line for the operator."""


class KVEventPublisher:
    """Publishes batches of events on a PUB socket, and those that it keeps on a ROUTER socket.

    A message has three frames: topic, number of the batch (8 bytes, from 0), and `[time, events, rank]` in MessagePack.  To
    `["", number]` the ROUTER answers with the batches from that number on, each as `["", topic, number, batch]`, and -1 as the
    number says that there are no more.

    One thread owns the sockets.  Where it falls far behind, what waits is dropped and subscribers are told that all blocks
    are cleared: they may miss blocks that are cached, but believe in none that is not.

    source: how a subscriber finds it, with the names of vLLM's `KVEventsConfig`.
    """

    source: Mapping[str, Any]

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_steps: int = 10_000,
    ) -> None:
        """Listen on the endpoints, and start the thread.

        buffer_steps: the most batches that are kept, and that a slow subscriber may be behind.

        Raises:
            CannotPublish: an endpoint is invalid or in use.
        """
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._num_batches = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: deque[Sequence[CacheEvent]] = deque()
        self._is_closing = False
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._events = self._bound(zmq.PUB, endpoint, buffer_steps)
            if replay_endpoint is not None:
                # A whole answer has room.
                self._replay = self._bound(zmq.ROUTER, replay_endpoint, buffer_steps + 1)
        except CannotPublish:
            self._context.destroy(linger=0)
            raise
        self.source = {
            "publisher": "zmq",
            "enable_kv_cache_events": True,
            "endpoint": _bound_to(self._events, endpoint),
            "replay_endpoint": replay_endpoint and _bound_to(self._replay, replay_endpoint),
            "buffer_steps": buffer_steps,
            "hwm": buffer_steps,
            "topic": topic,
        }
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_out, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Hand over the events of a step; it never waits, and only one thread may call it."""
        if self._is_closing:
            # An engine may end later than it was asked to.
            return
        if len(self._queue) >= _MAX_QUEUED:
            self._queue.clear()
            events = [AllBlocksCleared(), *events]
        self._queue.append(events)
        self._wake()

    def close(self) -> None:
        """Publish what is left, and end the thread; what is handed over afterwards is dropped."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._context.term()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _wake(self) -> None:
        # Where it is full the thread wakes anyway.
        with suppress(BlockingIOError):
            os.write(self._wake_out, b"\0")

    def _bound(self, kind: int, endpoint: str, most_waiting: int) -> "zmq.Socket[bytes]":
        sock = self._context.socket(kind)
        sock.set(zmq.SNDHWM, most_waiting)
        sock.set(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        sock.set(zmq.LINGER, _LINGER_MS)
        sock.set(zmq.IPV6, int("[" in endpoint))
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            reason = f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}"
            raise CannotPublish(reason) from None
        return sock

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._wake_in in ready:
                    os.read(self._wake_in, _MAX_QUEUED)
                self._send_queued()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
            self._send_queued()
        finally:
            # Else the context would wait for them for ever.
            for sock in (self._events, self._replay):
                if sock is not None:
                    sock.close()

    def _send_queued(self) -> None:
        # It may be emptied meanwhile.
        with suppress(IndexError):
            while True:
                self._send(self._queue.popleft())

    def _send(self, events: Sequence[CacheEvent]) -> None:
        batch = self._encoder.encode([time.time(), [*map(_as_vllm, events)], _RANK])
        number = self._num_batches.to_bytes(8)
        self._num_batches += 1
        self._events.send_multipart((self._topic, number, batch))
        self._kept.append((number, batch))

    def _answer(self, sock: "zmq.Socket[bytes]") -> None:
        peer, *frames = sock.recv_multipart()
        match frames:
            case [b"", first] if len(first) == 8:
                for number, batch in self._kept:
                    if number >= first:
                        sock.send_multipart((peer, b"", self._topic, number, batch))
                sock.send_multipart((peer, b"", b"", _END_OF_REPLAY, b""))


def _bound_to(sock: "zmq.Socket[bytes] | None", endpoint: str) -> str:
    """Return the endpoint with the port that the system has chosen, if it was to choose one."""
    assert sock is not None
    last = sock.get_string(zmq.LAST_ENDPOINT)
    if not endpoint.startswith("tcp://"):
        return last
    return f"{endpoint.rpartition(':')[0]}:{last.rpartition(':')[2]}"


def _as_vllm(event: CacheEvent) -> Mapping[str, Any]:
    """Return an event with vLLM's names, without those that say nothing here: consumers reject unknown ones."""
    match event:
        case BlocksStored(hashes, parent, token_ids, block_size):
            return {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": token_ids,
                "block_size": block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
            }
        case BlocksRemoved(hashes):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}
    return {"type": "AllBlocksCleared"}
