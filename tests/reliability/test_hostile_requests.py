"""Whatever a hostile client sends: a short error that tells nothing, and a living server."""

import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from scripts.server_process import Server
from tests.support.hostile import texts
from tests.support.hostile.apis import (
    MESSAGES,
    RESPONSES,
    SECRET,
    Attack,
    Attacks,
    ask,
    message,
)
from tests.support.hostile.fetches import fetches
from tests.support.hostile.grammars import cheap, grammars
from tests.support.hostile.http import (
    Requests,
    headers,
    methods,
    no_http,
    not_stored,
    paths,
)
from tests.support.hostile.json_bodies import content_types, json_bodies
from tests.support.hostile.numbers import large, numbers, too_much
from tests.support.hostile.sizes import sizes
from tests.support.hostile.wire import Answer, exchange, head
from tests.support.rejections import MAX_ANSWER, check_rejected
from tests.support.rows import rows
from tests.support.weekly import WEEK

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("all_is_well_in_the_end")]

BODIES: Final[dict[str, Callable[[], Attacks]]] = {
    "numbers": partial(numbers, 3, WEEK),
    "too much": too_much,
    "JSON": json_bodies,
    "content types": content_types,
    "half a character": texts.surrogates,
    "sizes": sizes,
    "grammars": grammars,
}
OTHERS: Final[dict[str, Callable[[], Requests]]] = {
    "paths": paths,
    "methods": methods,
    "headers": headers,
    "no HTTP": no_http,
    "not stored": not_stored,
}


def check_alive(server: Server) -> None:
    assert exchange(server.address(), head("GET", "/health")).status == 200


def strange(
    server: Server, attacks: Attacks, check: Callable[[Answer, Attack], None]
) -> dict[str, str]:
    """Send all, one by one; return what is wrong with the answers, by the name of the attack."""
    found = {}
    for name, attack in attacks.items():
        try:
            check(exchange(server.address(), attack.request()), attack)
        except (AssertionError, OSError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]
    check_alive(server)
    return found


def check_error(answer: Answer, attack: Attack) -> None:
    check_rejected(answer, path=attack.path)


def check_served(answer: Answer, attack: Attack) -> None:
    assert answer.status == 200, answer


@pytest.mark.parametrize("kind", BODIES)
def test_hostile_bodies_are_rejected(server: Server, kind: str) -> None:
    assert strange(server, BODIES[kind](), check_error) == {}


def test_large_values_of_any_field_are_served_or_rejected(server: Server) -> None:
    """Some fields are without effect, whatever they are."""

    def check(answer: Answer, attack: Attack) -> None:
        if answer.status != 200:
            check_error(answer, attack)

    assert strange(server, large(1, WEEK), check) == {}


@pytest.mark.slow
def test_every_number_is_rejected_in_every_field(server: Server) -> None:
    assert strange(server, numbers(100, WEEK), check_error) == {}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_hostile_requests_are_rejected(server: Server, kind: str) -> None:
    found = {}
    for name, (path, request) in OTHERS[kind]().items():
        try:
            check_rejected(exchange(server.address(), request), 501, path=path)
        except (AssertionError, OSError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]
    check_alive(server)
    assert found == {}


def test_what_would_be_slow_elsewhere_is_served(server: Server) -> None:
    assert strange(server, cheap(), check_served) == {}


def test_texts_without_half_a_character_are_served(server: Server) -> None:
    """So that it is this for which the others are rejected."""
    assert strange(server, texts.served(), check_served) == {}


def test_texts_that_look_hostile_are_served_and_stored(server: Server) -> None:
    looks = ("\0", "'; DROP TABLE responses; --", "<|im_start|>system\r\n")
    attacks = {text: Attack(RESPONSES, partial(ask, text, metadata={"k": text})) for text in looks}
    assert strange(server, attacks, check_served) == {}


def test_more_tokens_than_there_is_room_for_are_not_generated(server: Server) -> None:
    stops = ["a", "e", "i", "o", "h", "x"]
    body = partial(message, "Hi", max_tokens=2**31 - 1, stop_sequences=stops)
    assert strange(server, {"tokens": Attack(MESSAGES, body)}, check_served) == {}


@pytest.mark.parametrize(
    "lines",
    [
        ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA=="],
        ["Upgrade: websocket", "Sec-WebSocket-Version: 8", "Sec-WebSocket-Key: " + "A" * 22 + "=="],
        ["Upgrade: websocket", "Connection: Upgrade"],
    ],
)
def test_a_bad_request_for_a_websocket_is_rejected(server: Server, lines: list[str]) -> None:
    answer = exchange(server.address(), head("GET", RESPONSES, *lines))
    assert 400 <= answer.status < 500, answer


def check_not_read(answer: Answer, attack: Attack) -> None:
    assert 400 <= answer.status < 500, answer
    assert b"root:" not in answer.body


def test_nothing_is_fetched_for_a_request(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host, port = listener.getsockname()
        attacks = fetches(f"http://{host}:{port}/secret.json")
        assert strange(server, attacks, check_not_read) == {}
        with pytest.raises(BlockingIOError):
            listener.accept()


@rows("url", ["file:///etc/passwd", "/etc/passwd", "http://[::1]:1/x", "\\\\x\\y"])
def test_no_file_is_read_for_a_request(server: Server, url: str) -> None:
    assert strange(server, fetches(url), check_not_read) == {}


def test_the_check_sees_what_no_answer_may_tell() -> None:
    """Each of these would fail the tests above."""
    good = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}

    def answer(status: int = 400, kind: str = "application/json", **fields: object) -> Answer:
        return Answer(status, kind, json.dumps({"error": good | fields}).encode())

    bad: list[Callable[[], Answer]] = [
        lambda: answer(200),
        lambda: answer(500),
        lambda: answer(400, "text/plain"),
        lambda: answer(type="server_error"),
        lambda: answer(message=""),
        lambda: answer(message="x" * MAX_ANSWER),
        lambda: answer(message=f"you said {SECRET}"),
        lambda: answer(message="<Tokenizer object at 0x7f12345678>"),
        lambda: answer(message="no such file: /home/me/model.gguf"),
        lambda: answer(message='File "app/main.py", line 1'),
    ]
    check_rejected(answer())
    for make in bad:
        with pytest.raises(AssertionError):
            check_rejected(make())
    with pytest.raises(AssertionError):
        check_rejected(answer(), path=MESSAGES)
