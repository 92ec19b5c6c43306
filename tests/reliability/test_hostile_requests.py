"""Whatever a hostile client sends: a short error that tells nothing, and a living server."""

import json
import socket
from collections.abc import Callable

import pytest

from scripts.server_process import Server
from tests.support.hostile import (
    CHAT,
    CHAT_NUMBERS,
    CHEAP,
    COMPLETION_NUMBERS,
    COMPLETIONS,
    CONTENT_TYPES,
    COUNT,
    FORGED,
    GRAMMARS,
    HEADERS,
    JSON,
    MESSAGES,
    MESSAGES_NUMBERS,
    METHODS,
    NO_HTTP,
    NUMBER_PLACES,
    NUMBERS,
    PATHS,
    SECRET,
    SIZES,
    SURROGATES,
    SURROGATES_OF_MESSAGES,
    TEMPLATES,
    TOO_MUCH,
    Answer,
    chat,
    complete,
    exchange,
    head,
    message,
    messages_to_fetch,
    post,
    requests_to_fetch,
)
from tests.support.rejections import MAX_ANSWER, check_rejected

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("all_is_well_in_the_end")]


def check_alive(server: Server) -> None:
    assert exchange(server.address(), head("GET", "/health")).status == 200


def check_all_rejected(server: Server, path: str, bodies: dict[str, bytes]) -> None:
    for name, body in bodies.items():
        answer = exchange(server.address(), post(path, body))
        assert answer.status != 500, name
        check_rejected(answer, path=path)
    check_alive(server)


# Unbounded numbers


@pytest.mark.parametrize("field", CHAT_NUMBERS)
def test_a_number_beyond_measure_is_rejected_in_chats(server: Server, field: str) -> None:
    bodies = {
        kind: f'{{"messages": [{{"role": "user", "content": "{SECRET}"}}], "{field}": {number}}}'
        for kind, number in NUMBERS.items()
    }
    check_all_rejected(server, CHAT, {kind: body.encode() for kind, body in bodies.items()})


@pytest.mark.parametrize("field", COMPLETION_NUMBERS)
def test_a_number_beyond_measure_is_rejected_in_completions(server: Server, field: str) -> None:
    bodies = {
        kind: f'{{"prompt": "{SECRET}", "{field}": {number}}}' for kind, number in NUMBERS.items()
    }
    check_all_rejected(server, COMPLETIONS, {kind: body.encode() for kind, body in bodies.items()})


@pytest.mark.parametrize("field", MESSAGES_NUMBERS)
def test_a_number_beyond_measure_is_rejected_in_messages(server: Server, field: str) -> None:
    before = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "{SECRET}"}}]'
    bodies = {kind: f'{before}, "{field}": {number}}}'.encode() for kind, number in NUMBERS.items()}
    check_all_rejected(server, MESSAGES, bodies)


@pytest.mark.parametrize("place", NUMBER_PLACES)
def test_a_number_beyond_measure_is_rejected_inside_lists_and_maps(
    server: Server, place: str
) -> None:
    path, before, after = NUMBER_PLACES[place]
    bodies = {kind: f"{before}{number}{after}".encode() for kind, number in NUMBERS.items()}
    check_all_rejected(server, path, bodies)


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_more_than_the_server_gives_is_rejected(server: Server, kind: str) -> None:
    check_rejected(exchange(server.address(), post(CHAT, TOO_MUCH[kind]())))
    check_alive(server)


def test_more_answers_than_the_server_compares_are_rejected(server: Server) -> None:
    for fields in ({"best_of": 10**9}, {"best_of": 128}, {"prompt": ["a"] * 1024, "n": 16}):
        check_rejected(exchange(server.address(), post(COMPLETIONS, complete(**fields))))
    check_alive(server)


# Bodies


@pytest.mark.parametrize("kind", JSON)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT])
def test_json_that_is_none_or_made_to_be_slow_is_rejected(
    server: Server, path: str, kind: str
) -> None:
    check_rejected(exchange(server.address(), post(path, JSON[kind]())), path=path)
    check_alive(server)


@pytest.mark.parametrize("content_type", CONTENT_TYPES, ids=lambda text: text[:20] or "none")
def test_what_does_not_say_that_it_is_json_is_rejected(server: Server, content_type: str) -> None:
    check_rejected(exchange(server.address(), post(CHAT, chat(), content_type)))
    check_alive(server)


@pytest.mark.parametrize("place", SURROGATES)
def test_half_of_a_character_is_rejected(server: Server, place: str) -> None:
    check_rejected(exchange(server.address(), post(CHAT, SURROGATES[place]())))
    check_alive(server)


@pytest.mark.parametrize("place", SURROGATES_OF_MESSAGES)
def test_half_of_a_character_is_rejected_in_messages(server: Server, place: str) -> None:
    body = SURROGATES_OF_MESSAGES[place]()
    check_rejected(exchange(server.address(), post(MESSAGES, body)), path=MESSAGES)
    check_rejected(exchange(server.address(), post(MESSAGES, body, "text/plain")), path=MESSAGES)
    check_alive(server)


def test_half_of_a_character_is_rejected_as_a_prompt(server: Server) -> None:
    for prompt in ("\ud800", ["\ud800"]):
        check_rejected(exchange(server.address(), post(COMPLETIONS, complete(prompt=prompt))))
        body = json.dumps({"prompt": "\ud800"}).encode()
        check_rejected(exchange(server.address(), post("/tokenize", body)))
    check_alive(server)


# Oversized input


@pytest.mark.parametrize("kind", SIZES)
def test_megabytes_of_anything_are_rejected(server: Server, kind: str) -> None:
    path, body = SIZES[kind]
    check_rejected(exchange(server.address(), post(path, body())), path=path)
    check_alive(server)


# Signatures, and what else only messages have


@pytest.mark.parametrize("kind", FORGED)
def test_what_is_forged_or_out_of_order_is_rejected(server: Server, kind: str) -> None:
    check_rejected(exchange(server.address(), post(MESSAGES, FORGED[kind]())), path=MESSAGES)
    check_alive(server)


def test_more_tokens_than_there_is_room_for_are_not_generated(server: Server) -> None:
    body = message("Hi", max_tokens=2**31 - 1, stop_sequences=["a", "e", "i", "o"])
    assert exchange(server.address(), post(MESSAGES, body)).status == 200
    check_alive(server)


# Templates


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_and_what_would_change_them_are_rejected(server: Server, kind: str) -> None:
    check_rejected(exchange(server.address(), post(CHAT, TEMPLATES[kind]())))
    check_alive(server)


# Grammars


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_grammar_that_cannot_be_followed_is_rejected(server: Server, kind: str) -> None:
    check_rejected(exchange(server.address(), post(CHAT, GRAMMARS[kind]())))
    check_alive(server)


@pytest.mark.parametrize("kind", CHEAP)
def test_what_would_be_slow_elsewhere_is_served(server: Server, kind: str) -> None:
    answer = exchange(server.address(), post(CHAT, CHEAP[kind]()))
    assert answer.status == 200, answer
    check_alive(server)


# Files and other servers


def test_nothing_is_fetched_for_a_request(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host, port = listener.getsockname()
        for kind, body in requests_to_fetch(f"http://{host}:{port}/secret.json").items():
            answer = exchange(server.address(), post(CHAT, body()))
            assert 400 <= answer.status < 500, (kind, answer)
        for kind, body in messages_to_fetch(f"http://{host}:{port}/secret.json").items():
            answer = exchange(server.address(), post(MESSAGES, body()))
            assert 400 <= answer.status < 500, (kind, answer)
        check_alive(server)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "/etc/passwd", "http://[::1]:1/x", "\\\\x\\y"]
)
def test_no_file_is_read_for_a_request(server: Server, url: str) -> None:
    for kind, body in requests_to_fetch(url).items():
        answer = exchange(server.address(), post(CHAT, body()))
        assert 400 <= answer.status < 500, (kind, answer)
        assert b"root:" not in answer.body
    check_alive(server)


# Web pages of others


def test_a_web_page_of_another_origin_may_not_ask(server: Server) -> None:
    """A browser asks first what a page may send as JSON, and the server takes nothing but JSON."""
    origin = "Origin: https://example.com"
    asked = head("OPTIONS", CHAT, origin, "Access-Control-Request-Method: POST")
    sent = head("POST", CHAT, origin, "Content-Type: text/plain", f"Content-Length: {len(chat())}")
    for request in (asked, sent + chat(), head("GET", "/v1/models", origin)):
        answer = exchange(server.address(), request)
        assert not any(name.startswith("access-control-") for name in answer.header_names)
        assert answer.status in (403, 405) or request.startswith(b"GET ")
    check_alive(server)


# HTTP


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:30])
def test_a_path_that_leads_nowhere_is_not_found(server: Server, path: str) -> None:
    check_rejected(exchange(server.address(), head("GET", path)))
    check_alive(server)


@pytest.mark.parametrize("path", METHODS)
def test_a_method_that_a_path_does_not_take_is_rejected(server: Server, path: str) -> None:
    for method in METHODS[path]:
        check_rejected(exchange(server.address(), head(method, path)), path=path)
    check_alive(server)


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_are_wrong_or_too_many_are_rejected(server: Server, kind: str) -> None:
    lines = [*HEADERS[kind], "Content-Type: application/json"]
    if not any(line.startswith(("Content-Length", "Transfer")) for line in lines):
        lines.append(f"Content-Length: {len(chat())}")
    request = head("POST", CHAT, *lines) + chat()
    check_rejected(exchange(server.address(), request), 501)
    check_alive(server)


@pytest.mark.parametrize("kind", NO_HTTP)
def test_what_is_no_http_is_rejected(server: Server, kind: str) -> None:
    check_rejected(exchange(server.address(), NO_HTTP[kind]))
    check_alive(server)


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
