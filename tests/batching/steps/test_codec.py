"""Plans as bytes; random plans of the scheduler go through it in tests/batching/test_scheduler.py."""

import os
import pickle
from typing import Any

import pytest

from batching.block_store.keys import Kind
from batching.constraints.grammar import Grammar
from batching.constraints.grammar_text import GrammarText, choice_grammar
from batching.constraints.protocol import AllowedTokens
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.codec import InvalidPlan, decode, encode
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice, StartedSequence, StepPlan
from tests.support.remote import not_compiled


def plan_with(constraint: Grammar) -> StepPlan:
    spec = SequenceSpec(prompt=(1, 2), max_tokens=3, constraint=constraint)
    started = StartedSequence(0, spec, seed=1 << 63, output_token_ids=(3,))
    return StepPlan((Slice(0, 0, (1, 2, 3), num_samples=1),), started=(started,), ended=(7, 8))


def test_a_grammar_is_compiled_again_where_it_is_read() -> None:
    text = choice_grammar(["yes", "no"])
    compiled: list[GrammarText] = []

    def compile_grammar(grammar: Grammar) -> Grammar:
        compiled.append(grammar.text)
        return grammar

    written = plan_with(Grammar(text, (5,)))
    assert decode(encode(written), compile_grammar) == written
    assert compiled == [text]
    assert decode(encode(written), lambda _: Grammar(text)) != written


def test_equal_plans_print_and_hash_as_one() -> None:
    allowed = SequenceSpec(prompt=(1,), max_tokens=3, constraint=AllowedTokens([5, 2, 5]))
    for spec in (allowed, plan_with(Grammar(GrammarText("x"), (5,))).started[0].spec):
        read = decode(encode(StepPlan((), started=(StartedSequence(0, spec, 1),))), lambda g: g)
        assert hash(read.started[0].spec) == hash(spec)
        assert repr(read.started[0].spec) == repr(spec)
    assert "constraint=AllowedTokens((2, 5))" in repr(allowed)


def test_a_grammar_that_is_only_a_text_has_no_matcher() -> None:
    read = decode(encode(plan_with(Grammar(GrammarText("x")))), lambda grammar: grammar)
    with pytest.raises(AssertionError, match="compiled first"):
        SequenceState(read.started[0])


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


class AsAttribute:
    """What is written as an attribute of a class, as early versions of Python 3.11 do with members of enumerations."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name

    def __reduce__(self) -> tuple[object, tuple[type, str]]:
        return getattr, (self._kind, self._name)


def test_a_member_of_an_enumeration_is_read_from_any_version_of_python() -> None:
    written: Any = AsAttribute(Kind, Kind.BLOCK.name)
    read: Any = decode(encode(StepPlan((), ended=(written,))), not_compiled).ended
    assert read == (Kind.BLOCK,)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        pickle.dumps([1]),
        pickle.dumps(Harmful()),
        pickle.dumps(os.path.join),
        pickle.dumps(AsAttribute(StepPlan, "__init__")),
        pickle.dumps(AsAttribute(os._Environ, "get")),
    ],
)
def test_other_bytes_are_rejected_and_run_nothing(data: bytes) -> None:
    with pytest.raises(InvalidPlan):
        decode(data, not_compiled)
