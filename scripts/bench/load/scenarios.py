"""The kinds of load: which conversations clients have, and how many clients by default."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from scripts.bench.load.workload import Conversation, Writer

# Words; the tokens in the descriptions are those of SmolLM2 with its chat template.
_SHORT: Final = 19
_LONG: Final = 760
_SYSTEM: Final = 424
_TURNS: Final = 4


@dataclass(frozen=True, slots=True)
class Position:
    """Of a conversation: in which run, of which client, and how many came before."""

    run: str
    client: int
    number: int

    @property
    def step(self) -> int:
        """A number that walks through the kinds of a mix, for each client and across them."""
        return self.client + self.number

    def writer(self) -> Writer:
        return Writer(f"{self.run}/{self.client}/{self.number}")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of load; `shares_text` says that prompts may be found in a prefix cache."""

    name: str
    description: str
    conversation: Callable[[Position], Conversation]
    num_clients: int
    max_tokens: int
    requests_per_client: int = 2
    num_turns: int = 1
    shares_text: bool = False

    def conversations(self, run: str, client: int, num_requests: int) -> list[Conversation]:
        """Return a client's conversations, whose turns together are `num_requests`.

        The last one is shorter if the turns do not divide that number.
        """
        conversations = []
        for number, start in enumerate(range(0, num_requests, self.num_turns)):
            whole = self.conversation(Position(run, client, number))
            questions = whole.questions[: num_requests - start]
            conversations.append(Conversation(questions, whole.system))
        return conversations


def _short(position: Position) -> Conversation:
    return Conversation((position.writer().question(_SHORT),))


def _long(position: Position) -> Conversation:
    return Conversation((position.writer().question(_LONG),))


def _mixed(position: Position) -> Conversation:
    return _long(position) if position.step % 4 == 0 else _short(position)


def _shared_prefix(position: Position) -> Conversation:
    system = Writer(f"{position.run}/system").text(_SYSTEM)
    return Conversation(_short(position).questions, system=system)


def _multi_turn(position: Position) -> Conversation:
    writer = position.writer()
    return Conversation(tuple(writer.question(_SHORT) for _ in range(_TURNS)))


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario("short", "chat prompts of about 53 tokens", _short, 16, 48),
        Scenario(
            "shared-prefix",
            "short questions behind one system prompt of about 480 tokens, new in each round",
            _shared_prefix,
            8,
            32,
            requests_per_client=1,
            shares_text=True,
        ),
        Scenario("long", "prompts of about 880 tokens", _long, 4, 32),
        Scenario(
            "mixed",
            "a quarter of the prompts of about 880 tokens, the others of about 53",
            _mixed,
            8,
            32,
            requests_per_client=4,
        ),
        Scenario(
            "multi-turn",
            f"conversations of {_TURNS} turns, each sent with all that was said before",
            _multi_turn,
            4,
            32,
            requests_per_client=_TURNS,
            num_turns=_TURNS,
            shares_text=True,
        ),
    )
}
