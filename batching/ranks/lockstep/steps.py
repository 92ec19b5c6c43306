"""The steps of all ranks: rank 0 sends what it plans, and the others follow."""

from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

from batching.constraints.grammar import Grammar
from batching.errors import printable
from batching.inputs.sequence_spec import SequenceSpec
from batching.ranks.links import Leader, Member, RankLost
from batching.ranks.lockstep.tables import LatestTables
from batching.steps.codec import InvalidPlan, decode, encode
from batching.steps.step_plan import StartedSequence, StepPlan

# The first byte of a message; a plan follows only that of a step.
_STEP: Final = b"S"
_RESET: Final = b"R"
_END: Final = b"E"
_BROKEN: Final = b"B"


class Lockstep:
    """What rank 0 tells the others of its steps, in the order in which it takes them.

    Between `begin` and `computed` the others compute a step, and wait for this rank within it.
    """

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._is_computing = False
        self._tables = LatestTables()

    def begin(self, plan: StepPlan) -> None:
        """Let the others compute a step, which this rank has to compute next.

        Raises:
            RankLost: one of them is gone.
        """
        message = _STEP + encode(self._tables.without_unchanged(without_outputs(plan)))
        self._is_computing = True
        self._leader.send(message)

    def computed(self) -> None:
        """Record that this rank has computed what all of them compute."""
        self._is_computing = False

    def check(self, error: Exception) -> None:
        """Check that an error leaves no other rank within a step, where it would wait for this one.

        Raises:
            RankLost: it does; of another rank, if that is why.
        """
        if self._is_computing and not isinstance(error, RankLost):
            self._leader.check()
            self._leader.send(_BROKEN)
            reason = f"cannot compute a step with the others: {type(error).__name__}: {error}"
            raise RankLost(0, printable(reason)) from error

    def reset(self) -> None:
        """Let the others reset their part of the pool.

        Raises:
            RankLost: one of them is gone.
        """
        self._tables.forget()
        self._leader.send(_RESET)

    def end(self) -> None:
        """Let the others end, if they can still be told: within a step they only notice that this rank is gone."""
        if not self._is_computing:
            with suppress(RankLost):
                self._leader.send(_END)


class Follower(Protocol):
    """Computes the steps of another rank."""

    def follow(self, plan: StepPlan) -> None: ...

    def reset(self) -> None: ...


def follow(member: Member, follower: Follower) -> None:
    """Compute the steps of rank 0 until it ends.

    Raises:
        RankLost: rank 0 is gone.
        InvalidPlan: a message is none of rank 0.
        Exception: this rank could not compute a step.
    """
    tables = LatestTables()
    while (message := member.receive()) != _END:
        if message == _BROKEN:
            raise RankLost(0, "could not compute a step with the others")
        if message == _RESET:
            tables.forget()
            follower.reset()
        else:
            plan = decode(message.removeprefix(_STEP), _has_no_grammar)
            follower.follow(tables.with_unchanged(plan))


def without_outputs(plan: StepPlan) -> StepPlan:
    """Return what another rank needs of a plan: the rows of a step, and no reasons for what is sampled."""
    return replace(plan, started=tuple(map(_bare, plan.started)))


def _bare(started: StartedSequence) -> StartedSequence:
    """Return a sequence of which all tokens come in slices; the length of its prompt counts if it is pooled."""
    spec = started.spec
    prompt = (0,) * (1 if spec.pooling is None else len(spec.prompt))
    return StartedSequence(
        started.sequence_id, SequenceSpec(prompt=prompt, max_tokens=0, pooling=spec.pooling), 0
    )


def _has_no_grammar(grammar: Grammar) -> Grammar:
    raise InvalidPlan("a plan for other ranks has no grammar")
