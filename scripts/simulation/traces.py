"""What clients send, in words: the simulation takes a word for a token, the benchmark sends it as text."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Final, NamedTuple

from scripts.bench.load.workload import WORDS

# Programs of agents that all replicas serve, each with instructions and tools of its own.
_PROGRAMS: Final = 4


# SmolLM2 has two tokens for each of these.
_LONG_WORDS: Final = {"cellar", "melon", "raven", "robin", "scarf", "swan", "tulip"}
_NUMBERS: Final = [number for number, word in enumerate(WORDS) if word not in _LONG_WORDS]


class Turn(NamedTuple):
    """One request of a session.

    words: of the user's message or of the tool's result, by their numbers in `WORDS`, of those with one token.
    max_tokens: of the answer, which has as many.
    pause: seconds between the end of the answer before and this request.
    """

    words: tuple[int, ...]
    max_tokens: int
    pause: float = 0.0


class Session(NamedTuple):
    """A conversation: each turn is sent with all that was said before."""

    system: tuple[int, ...]
    turns: tuple[Turn, ...]


class Trace(NamedTuple):
    """A load for some replicas.

    clients: of each the sessions that it has, one after another.
    num_blocks: blocks of 32 tokens in the pool of a replica.
    """

    name: str
    clients: tuple[tuple[Session, ...], ...]
    num_blocks: int

    @property
    def num_requests(self) -> int:
        return sum(len(s.turns) for sessions in self.clients for s in sessions)


def agents(replicas: int, rng: Random) -> Trace:
    """Return agents that go on while tools run: long common instructions, contexts that grow turn by turn."""
    programs = [_words(rng, 800) for _ in range(_PROGRAMS)]

    def session() -> Session:
        turns = [Turn(_words(rng, 60), 16, rng.uniform(0, 5))]
        turns += [Turn(_words(rng, 120), 16, rng.expovariate(1 / 3)) for _ in range(5)]
        return Session(rng.choice(programs), tuple(turns))

    return Trace("agents", tuple((session(),) for _ in range(4 * replicas)), 320)


def chat(replicas: int, rng: Random) -> Trace:
    """Return people who read an answer, think, and ask again."""
    system = _words(rng, 30)

    def session() -> Session:
        pauses = [rng.uniform(0, 10), *(rng.expovariate(1 / 8) for _ in range(3))]
        return Session(system, tuple(Turn(_words(rng, 20), 20, pause) for pause in pauses))

    return Trace("chat", tuple((session(),) for _ in range(6 * replicas)), 320)


def tenants(replicas: int, rng: Random) -> Trace:
    """Return short questions behind instructions of their tenant; a pool has room for those of three."""
    systems = [_words(rng, 850) for _ in range(2 * replicas)]

    def session() -> Session:
        return Session(rng.choice(systems), (Turn(_words(rng, 12), 8),))

    return Trace("tenants", _clients(2 * replicas, 15, session), 88)


def answers(replicas: int, rng: Random) -> Trace:
    """Return short prompts that share nothing, and long answers, from as many clients as run at once."""

    def session() -> Session:
        return Session(_words(rng, 12), (Turn(_words(rng, 12), rng.randint(80, 240)),))

    return Trace("answers", _clients(8 * replicas, 8, session), 88)


TRACES: Final[dict[str, Callable[[int, Random], Trace]]] = {
    each.__name__: each for each in (agents, chat, tenants, answers)
}


def make_trace(name: str, replicas: int, seed: int) -> Trace:
    """Return the load for so many replicas, the same for the same seed."""
    return TRACES[name](replicas, Random(f"{name} {replicas} {seed}"))


class Conversation:
    """The tokens of a session's prompts, as many as SmolLM2's chat template makes of the words."""

    _SYSTEM: Final = (1, 3, 7)
    _USER: Final = (1, 4, 7)
    _END: Final = (2, 7)
    _ANSWER: Final = (1, 5, 6, 7)
    _NUM_OTHERS: Final = 8

    def __init__(self, system: Sequence[int]) -> None:
        self._tokens = [*self._message(self._SYSTEM, system)]

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Add a turn; return its prompt."""
        self._tokens += [*self._message(self._USER, turn.words), *self._ANSWER]
        return tuple(self._tokens)

    def add_answer(self, tokens: Sequence[int]) -> None:
        self._tokens += [*tokens, *self._END]

    def _message(self, begin: Sequence[int], words: Sequence[int]) -> Iterator[int]:
        yield from begin
        yield from (self._NUM_OTHERS + word for word in words)
        yield from self._END


def _words(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(_NUMBERS, k=count))


def _clients(
    count: int, sessions_each: int, session: Callable[[], Session]
) -> tuple[tuple[Session, ...], ...]:
    return tuple(tuple(session() for _ in range(sessions_each)) for _ in range(count))
