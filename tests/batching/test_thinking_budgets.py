"""Budgets of thinking in the engine: drafts, steps ahead, forks and preemption change nothing."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from batching.constraints.protocol import AllowedTokens
from batching.constraints.thinking import ThinkingBudget, ThinkingLimit
from batching.prompt_lookup import PromptLookup
from batching.request import BatchRequest
from batching.steps.model_runner import ModelRunner
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.fakes import TokenRunner, make_engine, next_token, small_config
from tests.support.remote import RemoteRunner
from tests.support.requests import make_request
from tests.support.thinking import output_of

START, END, BREAK = 0, 1, 2
TEXTS = {START: b"<t>", END: b"</t>", BREAK: b"\n"}
CLOSINGS = ((b"\n", (END, BREAK)), (b"", (BREAK, END, BREAK)))


def text_of(token_id: int) -> bytes:
    """One of eight tokens begins a thought, and one ends it."""
    return TEXTS.get(token_id % 8, b"a")


def budget(num_tokens: int, begun: bytes = b"<t>", *, is_first_only: bool = True) -> ThinkingBudget:
    limit = ThinkingLimit(
        num_tokens=num_tokens,
        start=b"<t>",
        ends=(b"</t>",),
        closings=CLOSINGS,
        begun=begun,
        is_first_only=is_first_only,
    )
    return ThinkingBudget(limit, None, text_of)


def expected(r: BatchRequest) -> list[int]:
    """What a request has if nothing else is served, and each token has its mask."""
    prompt = list(r.spec.prompt)
    assert r.spec.constraint is not None
    matcher = r.spec.constraint.matcher()
    return output_of(matcher, lambda output: next_token([*prompt, *output]), r.spec.output_limit)


class Guessing(PromptLookup):
    """Proposes what the model would say without a budget, with some mistakes."""

    def draft(self, token_ids: Sequence[int], max_length: int) -> tuple[int, ...]:
        known, drafts = list(token_ids), []
        for _ in range(max_length):
            known.append(next_token(known))
            drafts.append(known[-1] ^ (known[-1] % 11 == 0))
        return tuple(drafts)

    def may_draft(self, token_ids: Sequence[int]) -> bool:
        return token_ids[-1] % 4 == 0


budgets = st.builds(
    budget,
    st.integers(0, 12),
    st.sampled_from([b"", b"<t>", b"a", b"<t>\n"]),
    is_first_only=st.booleans(),
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(budgets, st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=5),
    st.sampled_from([5, 8, 20]),
    st.sampled_from([0, 1, 7]),
    st.booleans(),
    st.booleans(),
)
def test_an_output_does_not_depend_on_how_it_is_served(
    asked: list[tuple[ThinkingBudget, int, int]],
    num_blocks: int,
    max_draft_tokens: int,
    is_pipelined: bool,
    is_remote: bool,
) -> None:
    """Few blocks preempt, and what is preempted is read again."""

    def wrap(runner: TokenRunner) -> ModelRunner:
        return RemoteRunner(runner, text_of) if is_remote else runner

    config = small_config(
        num_blocks=num_blocks,
        max_num_batched_tokens=16,
        max_draft_tokens=max_draft_tokens,
        max_drafting_rows=12,
    )
    scheduler, engine = make_engine(config, wrap, is_pipelined=is_pipelined)
    made: list[BatchRequest] = []
    for request_id, (constraint, length, num_forks) in enumerate(asked):
        prompt = [request_id + 3] * length
        r = make_request(10 * request_id, prompt, max_tokens=11, constraint=constraint)
        made += [r, *(r.fork(r.request_id + 1 + i) for i in range(num_forks))]
        engine.add(r, *r.forks)
    for r in made:
        r.drafter = Guessing()
    while engine.has_work:
        engine.step()
        assert not engine.last_step.has_failed
    for r in made:
        assert r.output_token_ids == expected(r)
    assert scheduler.stats().num_free_blocks == num_blocks


def served(r: BatchRequest, *, max_draft_tokens: int = 0) -> list[str]:
    """Serve one request; return its slices."""
    lines: list[str] = []

    class Watched(TokenRunner):
        def run(self, plan: StepPlan) -> list[SliceOutput]:
            lines.extend(map(str, plan.slices))
            return super().run(plan)

    config = small_config(max_draft_tokens=max_draft_tokens)
    _, engine = make_engine(config, lambda _: Watched(config))
    engine.add(r)
    while engine.has_work:
        engine.step()
    return lines


def thinking(num_tokens: int) -> BatchRequest:
    """Of a prompt after which the model neither begins nor ends a thought by itself."""
    r = make_request(0, [5, 3, 59], max_tokens=12, constraint=budget(num_tokens))
    r.drafter = Guessing()
    return r


def test_drafts_reach_up_to_the_end_of_a_budget_and_go_on_behind_it() -> None:
    r = thinking(4)
    assert b"".join(map(text_of, expected(r))) == b"aaaa\n</t>\na\na\na"
    lines = served(r, max_draft_tokens=7)
    assert r.output_token_ids == expected(r)
    assert lines[:5] == ["0[0:3]", "0[3:4]", "0[4:5]+1", "0[6:7]", "0[7:8]"]
    assert any("+" in line for line in lines[5:]), lines


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 100])
def test_up_to_the_end_of_the_budget_it_is_the_output_without_one(num_tokens: int) -> None:
    r = thinking(num_tokens)
    free = make_request(1, r.spec.prompt, max_tokens=12)
    served(r)
    served(free)
    num_same = min(num_tokens, 12)
    assert r.output_token_ids[:num_same] == free.output_token_ids[:num_same]
    assert (r.output_token_ids == free.output_token_ids) is (num_tokens == 100)


def test_a_budget_around_a_constraint_is_kept_in_a_remote_executor_too() -> None:
    allowed = AllowedTokens([END, BREAK, 11, 12])
    inner = ThinkingBudget(budget(2).limit, allowed, text_of)
    r = make_request(0, [1, 2], max_tokens=9, constraint=inner)
    config = small_config()
    _, engine = make_engine(config, lambda runner: RemoteRunner(runner, text_of))
    engine.add(r)
    while engine.has_work:
        engine.step()
    assert r.output_token_ids == expected(r)
    assert set(r.output_token_ids) <= set(allowed.token_ids)
    assert END in r.output_token_ids[:4]
