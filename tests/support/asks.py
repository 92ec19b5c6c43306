"""Requests to a scripted model (`tests/support/scripted_server.py`) in threads, and what becomes of each."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from enum import Enum, auto
from itertools import count
from time import monotonic
from typing import Any, Final, NamedTuple

import httpx

from scripts.cluster.ports import NO_CERTIFICATES
from tests.support.clusters import TIMEOUT

MODEL: Final = "small"
_CHAT: Final = "/v1/chat/completions"
_NUMBER: Final = count()


class End(Enum):
    """How a response ends; CUT is also one that never begins."""

    COMPLETE = auto()
    ERROR_STATUS = auto()
    ERROR_EVENT = auto()
    CUT = auto()


class Answer(NamedTuple):
    """What a client has got; `seconds` are those that it took, `detail` is an error's."""

    end: End
    text: str
    seconds: float
    status: int | None = None
    detail: str = ""

    @property
    def has_begun(self) -> bool:
        return bool(self.text)


class Ask:
    """A request in a thread of its own, as a client of its own; `begun` is set at its first text.

    is_session: of a session of its own, too, which some routers place without regard to prompts.
    """

    def __init__(
        self,
        url: str,
        said: str,
        *,
        stream: bool = True,
        model: str = MODEL,
        is_session: bool = False,
    ) -> None:
        self.begun = threading.Event()
        self.is_stream = stream
        self._url = url
        # Unlike any other prompt, so that no router knows where it belongs.
        turn = {"role": "user", "content": f"{next(_NUMBER)}: [[{said}]]"}
        self._body = {"model": model, "messages": [turn], "stream": stream, "temperature": 0}
        self._headers = {"Authorization": f"Bearer key{next(_NUMBER)}"}
        if is_session:
            self._headers["X-Session-Id"] = str(next(_NUMBER))
        self._answer: Future[Answer] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self) -> Answer:
        """Wait for the end.

        Raises:
            TimeoutError: it takes longer than any request may.
        """
        return self._answer.result(2 * TIMEOUT)

    @property
    def is_over(self) -> bool:
        return self._answer.done()

    def _run(self) -> None:
        began = monotonic()
        answer = Answer(End.CUT, "", 0.0)
        try:
            with httpx.stream(
                "POST",
                self._url + _CHAT,
                json=self._body,
                headers=self._headers,
                timeout=TIMEOUT,
                trust_env=False,
                verify=NO_CERTIFICATES,
            ) as response:
                answer = answer._replace(status=response.status_code)
                for answer in self._answers(response):
                    if answer.has_begun:
                        self.begun.set()
        except httpx.HTTPError as error:
            answer = answer._replace(end=End.CUT, detail=repr(error))
        self._answer.set_result(answer._replace(seconds=monotonic() - began))

    def _answers(self, response: httpx.Response) -> Iterator[Answer]:
        """Yield what there is so far."""
        status = response.status_code
        if status != httpx.codes.OK:
            detail = response.read().decode(errors="replace")
            yield Answer(End.ERROR_STATUS, "", 0.0, status, detail)
        elif self.is_stream:
            yield from _streamed(response)
        else:
            body = json.loads(response.read())
            text = body["choices"][0]["message"]["content"]
            yield Answer(End.COMPLETE, text, 0.0, status)


def _streamed(response: httpx.Response) -> Iterator[Answer]:
    answer = Answer(End.CUT, "", 0.0, response.status_code)
    for line in response.iter_lines():
        if not line.startswith("data: {"):
            continue
        chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            answer = answer._replace(end=End.ERROR_EVENT, detail=line)
        for choice in chunk.get("choices", ()):
            answer = answer._replace(text=answer.text + (choice["delta"].get("content") or ""))
            if choice["finish_reason"]:
                answer = answer._replace(end=End.COMPLETE)
        yield answer


def counted(number: int) -> str:
    """Return what the model says after `[[count NUMBER]]`."""
    return " ".join(map(str, range(number + 1)))


class Load:
    """Clients that ask one thing after the other, streamed and not, and know what the answer is."""

    def __init__(self, url: str, *, num_clients: int = 4, to: int = 5) -> None:
        self._url = url
        self._to = to
        self._ended = threading.Event()
        self._answers: list[Answer] = []
        self._asked = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._ask, args=(index % 2 == 0,), daemon=True)
            for index in range(num_clients)
        ]

    def _ask(self, stream: bool) -> None:
        while not self._ended.is_set():
            self._answers.append(Ask(self._url, f"count {self._to}", stream=stream).answer())
            self._asked.release()

    def wait_for(self, number: int) -> None:
        """Wait until so many more have been answered."""
        for _ in range(number):
            assert self._asked.acquire(timeout=2 * TIMEOUT), "the load stands still"

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT)

    @property
    def answers(self) -> list[Answer]:
        return list(self._answers)

    @property
    def text(self) -> str:
        """What each answer says."""
        return counted(self._to)
