"""Whatever a hostile client sends to `/v1/responses`: a short error, and a living server."""

from typing import Final

import pytest

from scripts.server_process import Server
from tests.support import hostile
from tests.support.hostile import SECRET, exchange, head, post
from tests.support.hostile_responses import (
    NUMBERS,
    RESPONSES,
    SIZES,
    SURROGATES,
    WRONG,
    ask,
)
from tests.support.rejections import check_rejected

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("all_is_well_in_the_end")]

UNKNOWN: Final = f"{RESPONSES}/resp_1"


def check_post(server: Server, body: bytes) -> None:
    check_rejected(exchange(server.address(), post(RESPONSES, body)))
    assert exchange(server.address(), head("GET", "/health")).status == 200


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_beyond_measure_is_rejected(server: Server, field: str) -> None:
    for number in hostile.NUMBERS.values():
        check_post(server, f'{{"input": "{SECRET}", "{field}": {number}}}'.encode())


@pytest.mark.parametrize("kind", hostile.JSON)
def test_json_that_is_none_or_made_to_be_slow_is_rejected(server: Server, kind: str) -> None:
    check_post(server, hostile.JSON[kind]())


@pytest.mark.parametrize("place", SURROGATES)
def test_half_of_a_character_is_rejected(server: Server, place: str) -> None:
    check_post(server, SURROGATES[place]())


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_or_forged_is_rejected(server: Server, kind: str) -> None:
    check_post(server, WRONG[kind]())


@pytest.mark.parametrize("kind", SIZES)
def test_megabytes_of_anything_are_rejected(server: Server, kind: str) -> None:
    check_post(server, SIZES[kind]())


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "OPTIONS", "TRACE", "FOO"])
def test_a_method_that_the_path_does_not_take_is_rejected(server: Server, method: str) -> None:
    check_rejected(exchange(server.address(), head(method, RESPONSES)))


@pytest.mark.parametrize("upgrade", ["websocket", "WebSocket"])
def test_a_request_for_a_websocket_is_rejected(server: Server, upgrade: str) -> None:
    lines = ["Upgrade: " + upgrade, "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA=="]
    answer = exchange(server.address(), head("GET", RESPONSES, *lines))
    check_rejected(answer)
    assert answer.status == 426


@pytest.mark.parametrize(
    "path",
    [
        UNKNOWN,
        f"{UNKNOWN}?stream=true",
        f"{UNKNOWN}?stream=maybe",
        f"{UNKNOWN}/input_items",
        f"{UNKNOWN}/input_items?limit=-1",
        f"{UNKNOWN}/input_items?order=up",
        f"{UNKNOWN}/input_items?after=%ed%a0%80",
        f"{RESPONSES}/%00",
        f"{RESPONSES}/%ff",
        f"{RESPONSES}/%ed%a0%80",
        f"{RESPONSES}/' OR 1=1 --".replace(" ", "%20"),
        f"{RESPONSES}/..%2f..%2fetc%2fpasswd",
        f"{RESPONSES}/{'a' * 20_000}",
        f"{RESPONSES}/",
    ],
    ids=lambda path: path[:40],
)
def test_what_is_not_stored_is_not_found(server: Server, path: str) -> None:
    for method in ("GET", "DELETE"):
        check_rejected(exchange(server.address(), head(method, path)))
    check_rejected(exchange(server.address(), post(f"{path}/cancel", b"")))


def test_a_text_that_looks_hostile_is_served_and_stored(server: Server) -> None:
    for text in ("\0", "'; DROP TABLE responses; --", "<|im_start|>system\r\n"):
        answer = exchange(server.address(), post(RESPONSES, ask(text, metadata={"k": text})))
        assert answer.status == 200, answer
