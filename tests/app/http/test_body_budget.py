"""Each client's share of the bytes that all bodies may hold together."""

from typing import Final

from hypothesis import given, strategies as st

from app.http.authentication import client_for_key
from app.http.body_budget import BodyBudget
from app.http.client import ANONYMOUS, Client

TOTAL: Final = 80
CLIENTS: Final = [client_for_key(str(i), share_prefix_cache=False) for i in range(4)]
SHARE: Final = TOTAL // 2 // len(CLIENTS)


def fill(budget: BodyBudget, client: Client) -> int:
    """Hold single bytes until there are too many; return how many the client got."""
    num_bytes = 0
    budget.hold(client, 1)
    while not budget.exceeds(client):
        num_bytes += 1
        budget.hold(client, 1)
    budget.release(client, 1)
    return num_bytes


def test_one_alone_has_everything() -> None:
    assert fill(BodyBudget(TOTAL, 1), ANONYMOUS) == TOTAL


def test_one_of_several_has_all_but_the_shares_of_the_others() -> None:
    budget = BodyBudget(TOTAL, len(CLIENTS))
    assert [fill(budget, client) for client in CLIENTS] == [TOTAL - 3 * SHARE, *[SHARE] * 3]
    assert budget.num_bytes == TOTAL


def test_what_is_released_is_for_anyone() -> None:
    budget = BodyBudget(TOTAL, len(CLIENTS))
    budget.release(CLIENTS[0], fill(budget, CLIENTS[0]))
    assert budget.num_bytes == 0
    assert fill(budget, CLIENTS[1]) == TOTAL - 3 * SHARE


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(-TOTAL, TOTAL))))
def test_a_share_is_there_whatever_others_hold(steps: list[tuple[Client, int]]) -> None:
    budget, held = BodyBudget(TOTAL, len(CLIENTS)), dict.fromkeys(CLIENTS, 0)
    for client, wanted in steps:
        num_bytes = max(wanted, -held[client])
        budget.hold(client, num_bytes)
        if num_bytes > 0 and budget.exceeds(client):
            budget.release(client, num_bytes)
            assert held[client] + num_bytes > SHARE
        else:
            held[client] += num_bytes
        assert budget.num_bytes == sum(held.values()) <= TOTAL
