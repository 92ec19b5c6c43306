"""Clients that connect and leave, each in its own way."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from scripts.server_process import Address
from scripts.soak.client import CHAT, COMPLETIONS
from scripts.soak.wire import Broken, Exchange, request_bytes

Leaving = Callable[[Address, random.Random], Awaitable[None]]

# So many that no leaked request ends by itself while the test looks.
_MAX_TOKENS: Final = 3000
# The least that Linux grants: the server's own buffers are full after a few events.
_SMALL_BUFFER: Final = 2048
# Seconds for which a client stays that reads nothing.
_PATIENCE: Final = 0.5
_MAX_EVENTS: Final = 4

_SCHEMA: Final = {"type": "object", "properties": {"name": {"type": "string"}}}
_TOOL: Final = {"type": "function", "function": {"name": "look_up", "parameters": _SCHEMA}}
# How often a prompt's words are repeated: mostly once, now and then so that it takes several steps.
_REPEATS: Final = (*[1] * 16, *[8] * 3, 64)
_VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"n": 3},
    {"priority": "high"},
    {"priority": "low"},
    {"logprobs": True, "top_logprobs": 5},
    {"response_format": {"type": "json_object"}},
    {"tools": [_TOOL]},
)


async def connect_only(address: Address, rng: random.Random) -> None:
    (await Exchange.open(address)).close()


async def leave_in_the_head(address: Address, rng: random.Random) -> None:
    request = _request(rng)
    await _send_a_part(address, request, rng.randrange(1, request.index(b"\r\n\r\n")))


async def leave_in_the_body(address: Address, rng: random.Random) -> None:
    request = _request(rng)
    await _send_a_part(address, request, rng.randrange(request.index(b"\r\n\r\n"), len(request)))


async def leave_before_the_first_event(address: Address, rng: random.Random) -> None:
    async with await Exchange.open(address) as exchange:
        await exchange.send(_request(rng))


async def leave_in_the_stream(address: Address, rng: random.Random) -> None:
    async with await Exchange.open(address) as exchange:
        await exchange.send(_request(rng))
        await _read_some(exchange, rng)


async def leave_before_a_whole_response(address: Address, rng: random.Random) -> None:
    async with await Exchange.open(address) as exchange:
        await exchange.send(_request(rng, stream=False))
        with suppress(Broken, TimeoutError):
            async with asyncio.timeout(rng.uniform(0, _PATIENCE)):
                await exchange.head()


async def reset_in_the_stream(address: Address, rng: random.Random) -> None:
    exchange = await Exchange.open(address)
    await exchange.send(_request(rng))
    await _read_some(exchange, rng)
    exchange.reset()


async def reset_at_once(address: Address, rng: random.Random) -> None:
    exchange = await Exchange.open(address)
    await exchange.send(_request(rng))
    exchange.reset()


async def half_close(address: Address, rng: random.Random) -> None:
    """Say that nothing more comes, and stay until the server closes."""
    async with await Exchange.open(address) as exchange:
        await exchange.send(_request(rng))
        exchange.half_close()
        await exchange.skip_to_end()


async def half_close_in_the_body(address: Address, rng: random.Random) -> None:
    request = _request(rng)
    async with await Exchange.open(address) as exchange:
        await exchange.send(request[: rng.randrange(1, len(request))])
        exchange.half_close()
        await exchange.skip_to_end()


async def read_nothing(address: Address, rng: random.Random) -> None:
    exchange = await Exchange.open(address, receive_buffer=_SMALL_BUFFER)
    await exchange.send(_request(rng))
    exchange.pause()
    await asyncio.sleep(rng.uniform(0, _PATIENCE))
    rng.choice((exchange.close, exchange.reset))()


LEAVINGS: Final[tuple[Leaving, ...]] = (
    connect_only,
    leave_in_the_head,
    leave_in_the_body,
    leave_before_the_first_event,
    leave_in_the_stream,
    leave_before_a_whole_response,
    reset_in_the_stream,
    reset_at_once,
    half_close,
    half_close_in_the_body,
    read_nothing,
)


async def storm(address: Address, num_clients: int, seed: int, at_once: int = 64) -> Counter[str]:
    """Let clients come and leave, a number at once; return how many left in which way.

    As many leave in each way, in an order and at points that follow from the seed.
    """
    rng = random.Random(seed)
    leavings = [LEAVINGS[i % len(LEAVINGS)] for i in range(num_clients)]
    rng.shuffle(leavings)
    slots = asyncio.Semaphore(at_once)

    async def client(leave: Leaving, own: random.Random) -> None:
        async with slots:
            # The server may end a connection first; then there is nothing left to leave.
            with suppress(ConnectionResetError, BrokenPipeError):
                await leave(address, own)

    async with asyncio.TaskGroup() as group:
        for leave in leavings:
            group.create_task(client(leave, random.Random(rng.random())))
    return Counter(leave.__name__ for leave in leavings)


def _request(rng: random.Random, *, stream: bool = True) -> bytes:
    """Return a request that would run for long: a short or a long prompt, one completion or several."""
    words = f"{rng.random()} " * rng.choice(_REPEATS)
    common = {"max_tokens": _MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    if rng.random() < 0.3:
        return request_bytes(COMPLETIONS, {"prompt": words, **common})
    message = {"role": "user", "content": f"{words} Tell a long story."}
    return request_bytes(CHAT, {"messages": [message], **common, **rng.choice(_VARIANTS)})


async def _send_a_part(address: Address, request: bytes, stop: int) -> None:
    async with await Exchange.open(address) as exchange:
        await exchange.send(request[:stop])


async def _read_some(exchange: Exchange, rng: random.Random) -> None:
    """Read the head and a few events; a rejected request has none."""
    num_events = rng.randrange(_MAX_EVENTS)
    with suppress(Broken):
        head = await exchange.head()
        if num_events and head.status == 200:
            async for _ in exchange.pieces(head):
                num_events -= 1
                if not num_events:
                    return
