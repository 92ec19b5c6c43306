"""Conversations in the shape and size of agents' ones: what a turn shares with earlier ones is cached."""

from collections.abc import Iterator

import httpx
import pytest

from scripts.agent_replay import APIS, replay, table
from scripts.server_process import MODEL, Server
from tests.support.weekly import weekly

NUM_TURNS = 12


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Serve the scripted model: the scheduler and the prefix cache are real."""
    with (
        Server(("-m", "tests.support.scripted_server")) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client
        assert server.stop() == 0


@pytest.mark.parametrize("api", weekly(APIS, 1))
def test_every_turn_finds_what_it_shares(client: httpx.Client, api: str) -> None:
    exchanges = list(replay(client, APIS[api], MODEL, NUM_TURNS))
    # Of two agents; in each turn a tool is called, and its result is answered.
    assert len(exchanges) == 2 * 2 * NUM_TURNS
    report = table(exchanges)
    first, second = exchanges[0], exchanges[2]
    assert first.num_prompt > 7000, report
    assert (second.agent, second.turn) == ("second", 0)
    # The system prompt and the tools.
    assert second.num_shared > 6500, report
    assert all(exchange.share >= 0.95 for exchange in exchanges[1:]), report
    # Only whole blocks are found, and of nothing else than what was sent before.
    assert all(exchange.num_cached < exchange.num_prompt for exchange in exchanges), report
