"""Budgets of thinking: nothing is cut, the end is forced in time, and what needs no mask gets none."""

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from batching.constraints.protocol import UNLIMITED, AllowedTokens
from batching.constraints.thinking import LATE_TOKENS, ThinkingBudget
from tests.support.thinking import allowed, byte_budget, byte_of, output_of, say

# Bytes that make markers, their beginnings and parts of characters likely.
PIECES = [b"<t>", b"</t>", b"<", b"</", b"t>", b"a", b"\n", " ü€😊".encode(), b"\xf0\x9f", b"\xe2"]


@pytest.mark.parametrize(
    ("num_tokens", "said", "expected"),
    [
        (0, b"<t>abc", b"<t></t>abc"),
        (1, b"<t>abc", b"<t>a</t>bc"),
        (2, b"<t>ab</t>c<d", b"<t>ab</t></t>c<d"),
        (9, b"<t>ab</t>c", b"<t>ab</t>c"),
        (2, b"\n <t>abc", b"\n <t>ab</t>c"),
        (2, b"abc<d", b"abc<d"),
        # Two thoughts share the budget, the end that the model writes included.
        (7, b"<t>ab</t>\n<t>cd", b"<t>ab</t>\n<t>c</t>d"),
    ],
)
def test_the_end_is_forced_when_the_budget_is_used_up(
    num_tokens: int, said: bytes, expected: bytes
) -> None:
    assert say(byte_budget(num_tokens).matcher(), said) == expected


def test_line_breaks_around_the_end_are_forced_too() -> None:
    budget = byte_budget(2, before=b"\n", after=b"\n\n")
    assert say(budget.matcher(), b"<t>abc") == b"<t>ab\n</t>\n\nc"
    # One that is there already is not written again.
    assert say(budget.matcher(), b"<t>a\nc") == b"<t>a\n</t>\n\nc"


@pytest.mark.parametrize(("begun", "rest"), [(b"a<", b"/t>"), (b"a</t", b">"), (b"<t<", b"/t>")])
def test_an_end_that_has_begun_is_finished(begun: bytes, rest: bytes) -> None:
    said = say(byte_budget(len(begun)).matcher(), b"<t>" + begun + b"xyz")
    assert said == b"<t>" + begun + rest + b"xyz"


@pytest.mark.parametrize("character", ["ü", "€", "😊"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_the_end_is_not_forced_within_a_character(character: str, num_tokens: int) -> None:
    said = say(byte_budget(num_tokens).matcher(), b"<t>" + (2 * character).encode() + b"abcd")
    thought = said.partition(b"</t>")[0].removeprefix(b"<t>").decode()
    assert num_tokens <= len(thought.encode()) < num_tokens + 4
    assert thought in 2 * character + "abcd"


def test_a_character_that_never_ends_does_not_hold_up_the_end() -> None:
    assert say(byte_budget(1).matcher(), b"<t>" + b"\xf0" * 9)[:8] == b"<t>\xf0\xf0\xf0\xf0<"


@pytest.mark.parametrize(("begun", "num_tokens"), [(b"<t>", 2), (b"<t>abc", 2), (b"<t>\n", 0)])
def test_a_prompt_may_end_inside_the_thought(begun: bytes, num_tokens: int) -> None:
    said = say(byte_budget(num_tokens, begun=begun, before=b"\n").matcher(), b"xyz!")
    breaks = b"" if begun.endswith(b"\n") else b"\n"
    assert said == b"xyz!"[:num_tokens] + breaks + b"</t>" + b"xyz!"[num_tokens:]


def test_a_later_thought_has_a_few_tokens_in_any_case() -> None:
    """So that an answer needs no mask, which would keep it from being drafted and planned ahead."""
    matcher = byte_budget(0).matcher()
    assert matcher.num_free == 1
    assert say(matcher, b"<t>Yes") == b"<t></t>Yes"
    assert matcher.num_free == 1 + LATE_TOKENS
    said = say(matcher, b"<t>" + b"a" * (LATE_TOKENS + 1))
    assert said == b"<t>" + b"a" * LATE_TOKENS + b"</t>a"
    # The same in one token with text before it.
    texts = {0: b"No<t>", 1: b"x"}
    matcher = ThinkingBudget(byte_budget(0).limit, None, texts.__getitem__).matcher()
    matcher.accept(0)
    assert matcher.num_free == LATE_TOKENS


def test_after_the_first_thought_a_marker_may_be_text() -> None:
    matcher = byte_budget(6, is_first_only=True).matcher()
    said = b"<t>a</t>{'a': '<t>abcdefgh'}"
    assert say(matcher, said) == said
    assert matcher.num_free == UNLIMITED


def test_it_goes_on_where_the_tokens_of_the_end_have_other_bytes() -> None:
    matcher = ThinkingBudget(byte_budget(0, begun=b"<t>").limit, None, lambda token: b"?").matcher()
    for token_id in b"</t>":
        assert allowed(matcher) == [token_id]
        matcher.accept(token_id)
    assert len(allowed(matcher)) == 256


@st.composite
def budgets(draw: st.DrawFn) -> ThinkingBudget:
    return byte_budget(
        draw(st.integers(0, 9)),
        before=draw(st.sampled_from([b"", b"\n"])),
        after=draw(st.sampled_from([b"", b"\n\n"])),
        begun=draw(st.sampled_from([b"", b"<t>", b"<t>\n", b"<t>a</t>", b"ab", b"<"])),
        is_first_only=draw(st.booleans()),
    )


@given(budgets(), st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_tokens_that_are_said_to_be_free_need_no_mask(budget: ThinkingBudget, said: bytes) -> None:
    """Whatever they are; and what is not free is forced, but for the rest of a character."""
    matcher, rest, num_free = budget.matcher(), [*said], 0
    while rest:
        num_free = max(num_free - 1, matcher.num_free)
        may_follow = allowed(matcher)
        assert len(may_follow) in (1, 256)
        assert not num_free or len(may_follow) == 256
        assert matcher.num_free <= num_free
        token_id = rest.pop(0) if len(may_follow) > 1 else may_follow[0]
        matcher.accept(token_id)


@given(budgets(), st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_nothing_is_cut(budget: ThinkingBudget, said: bytes) -> None:
    """All that the model says is there, in its order, around what is forced."""
    left = iter(say(budget.matcher(), said))
    assert all(byte in left for byte in said)


@given(st.integers(0, 9), st.lists(st.sampled_from(PIECES), min_size=9).map(b"".join))
def test_no_thought_is_longer_than_the_budget(num_tokens: int, said: bytes) -> None:
    """But for the rest of a character."""
    thought, end, _ = say(byte_budget(num_tokens).matcher(), b"<t>" + said).partition(b"</t>")
    assert end
    assert len(thought) <= len(b"<t>") + num_tokens + 3


def test_an_inner_constraint_is_kept_to() -> None:
    inner = AllowedTokens(b"<t>/ab")
    matcher = byte_budget(1, inner=inner).matcher()
    assert matcher.num_free == 0
    assert bytes(allowed(matcher)) == b"/<>abt"
    for token_id in b"<t>a</t>b":
        matcher.accept(token_id)
    assert bytes(allowed(matcher)) == b"/<>abt"
    assert not matcher.is_complete and matcher.error is None
    # Where it lets the end not follow, there is none.
    without = byte_budget(0, inner=AllowedTokens(b"ab"), begun=b"<t>").matcher()
    for _ in range(3):
        assert bytes(allowed(without)) == b"ab"
        without.accept(ord("a"))


def test_it_is_forced_in_the_midst_of_an_inner_constraint() -> None:
    matcher = byte_budget(2, inner=AllowedTokens(range(128))).matcher()
    assert say(matcher, b"<t>abc") == b"<t>ab</t>c"


def test_budgets_are_values() -> None:
    first, same, other = byte_budget(3), byte_budget(3), byte_budget(4)
    assert first == same and hash(first) == hash(same) and repr(first) == repr(same)
    assert first != other and first != byte_budget(3, inner=AllowedTokens([1]))
    read = pickle.loads(pickle.dumps(byte_budget(3, inner=AllowedTokens([1]))))
    assert read == byte_budget(3, inner=AllowedTokens([1]))
    with pytest.raises(AssertionError, match="vocabulary"):
        read.matcher()


@given(budgets(), st.integers(0, 255), st.integers(1, 40))
def test_a_matcher_that_is_made_anew_goes_on_the_same(
    budget: ThinkingBudget, seed: int, num_tokens: int
) -> None:
    """As after a preemption: the position follows from the output alone."""

    def next_token(output: Sequence[int]) -> int:
        text = b"".join(PIECES)
        return text[(seed + 7 * len(output) + sum(output)) % len(text)]

    output = output_of(budget.matcher(), next_token, num_tokens)
    resumed = budget.matcher()
    for token_id in output:
        resumed.accept(token_id)
    again = budget.matcher()
    assert output_of(again, next_token, num_tokens) == output
    assert (again.num_free, allowed(again)) == (resumed.num_free, allowed(resumed))
    assert byte_of(output[0]) == bytes(output[:1])
