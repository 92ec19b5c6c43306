"""The clients of a trace over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

import httpx

from scripts.bench.load.client import ChatClient, Messages
from scripts.bench.load.workload import WORDS
from scripts.server_process import MODEL
from scripts.simulation.records import Served
from scripts.simulation.traces import Session, Trace

_TIMEOUT: Final = 120.0
# As many tokens as the trace has, whatever the model would say.
_OPTIONS: Final = {"ignore_eos": True}


class RequestFailed(Exception):
    """A request has not been answered as it should; the text says how."""


class Answer(NamedTuple):
    text: str
    served: Served


Ask = Callable[[Messages, int], Awaitable[Answer]]


async def serve(trace: Trace, url: str, *, streams: bool) -> list[Served]:
    """Return what became of all requests of a trace.

    streams: without, the first token comes with the last one, and the clients need less of the cores that the
        replicas compute on.

    Raises:
        RequestFailed: one of them failed.
    """
    async with (
        ChatClient(url, MODEL, _TIMEOUT, _OPTIONS) as chat,
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, trust_env=False) as http,
    ):

        async def streamed(messages: Messages, max_tokens: int) -> Answer:
            return await _streamed(chat, messages, max_tokens)

        async def whole(messages: Messages, max_tokens: int) -> Answer:
            return await _whole(http, messages, max_tokens)

        ask = streamed if streams else whole
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(_client(each, ask)) for each in trace.clients]
        except ExceptionGroup as group:
            if (failed := group.subgroup(RequestFailed)) is None:
                raise
            raise failed.exceptions[0] from None
    return [served for task in tasks for served in task.result()]


async def _client(sessions: Sequence[Session], ask: Ask) -> list[Served]:
    """Have the sessions one after another."""
    found: list[Served] = []
    for session in sessions:
        messages = [_message("system", _text(session.system))]
        for turn in session.turns:
            await asyncio.sleep(turn.pause)
            messages.append(_message("user", _text(turn.words)))
            answer = await ask(tuple(messages), turn.max_tokens)
            if answer.served.num_output != turn.max_tokens:
                raise RequestFailed(
                    f"{answer.served.num_output} tokens instead of {turn.max_tokens}"
                )
            messages.append(_message("assistant", answer.text))
            found.append(answer.served)
    return found


async def _streamed(chat: ChatClient, messages: Messages, max_tokens: int) -> Answer:
    record = await chat.ask(messages, max_tokens)
    if record.error is not None:
        raise RequestFailed(record.error)
    first = record.sent + (record.ttft or 0.0)
    return Answer(record.text, _served(record.sent, first, record.ended, record.usage))


async def _whole(http: httpx.AsyncClient, messages: Messages, max_tokens: int) -> Answer:
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        **_OPTIONS,
    }
    sent = perf_counter()
    try:
        response = await http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        raise RequestFailed(repr(error)) from None
    ended = perf_counter()
    if response.status_code != httpx.codes.OK:
        raise RequestFailed(f"HTTP {response.status_code}: {response.text[:300]}")
    answer = response.json()
    text: str = answer["choices"][0]["message"]["content"] or ""
    return Answer(text, _served(sent, ended, ended, answer["usage"]))


def _served(sent: float, first: float, ended: float, usage: dict[str, Any]) -> Served:
    return Served(
        sent=sent,
        first=first,
        ended=ended,
        num_prompt=usage["prompt_tokens"],
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_output=usage["completion_tokens"],
    )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(words: Sequence[int]) -> str:
    return " ".join(WORDS[word] for word in words)
