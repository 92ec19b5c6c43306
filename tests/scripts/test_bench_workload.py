import pytest

from scripts.bench.load.scenarios import SCENARIOS
from scripts.bench.load.workload import Conversation

NUM_CLIENTS = 8
RUNS = ("0/x/0", "0/x/1", "0/x/0/warm-up", "1/x/0")


def conversations(name: str, run: str, num_requests: int = 8) -> list[Conversation]:
    scenario = SCENARIOS[name]
    return [
        conversation
        for client in range(NUM_CLIENTS)
        for conversation in scenario.conversations(run, client, num_requests)
    ]


def first_words(text: str) -> tuple[str, ...]:
    return tuple(text.split()[:4])


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_two_prompts_begin_alike_in_any_round_or_warm_up(name: str) -> None:
    openings = [
        first_words(conversation.questions[0])
        for run in RUNS
        for conversation in conversations(name, run)
    ]
    assert len(set(openings)) == len(openings)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_seed_decides_the_texts(name: str) -> None:
    assert conversations(name, "0/x/0") == conversations(name, "0/x/0")
    assert conversations(name, "0/x/0") != conversations(name, "1/x/0")


def test_lengths_are_what_the_scenarios_say() -> None:
    def lengths(name: str) -> set[int]:
        return {len(c.questions[0].split()) for c in conversations(name, "0/x/0")}

    assert lengths("short") == {19}
    assert lengths("long") == {760}
    assert {len((c.system or "").split()) for c in conversations("shared-prefix", "r")} == {424}


def test_a_quarter_of_the_mix_is_long_at_any_time() -> None:
    asked = conversations("mixed", "0/x/0")
    is_long = [len(conversation.questions[0].split()) > 100 for conversation in asked]
    assert sum(is_long) * 4 == len(is_long)
    by_number = [is_long[number::8] for number in range(8)]
    assert all(sum(column) * 4 == len(column) for column in by_number)
