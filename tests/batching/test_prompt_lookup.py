from itertools import pairwise

from batching.prompt_lookup import PromptLookup

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_followed_the_last_three_tokens_before_is_the_draft() -> None:
    assert PromptLookup().draft([*PROMPT, 1, 2, 3], 2) == (4, 5)


def test_what_was_said_between_does_not_matter() -> None:
    assert PromptLookup().draft([*PROMPT, 20, 21, 22, 23, 5, 6, 7], 1) == (8,)


def test_a_draft_may_follow_where_two_tokens_began_three_before() -> None:
    assert PromptLookup().may_draft([*PROMPT, 20, 1, 2])
    assert not PromptLookup().may_draft([*PROMPT, 20, 1, 3])
    # With a fourth one, these three are said twice.
    assert PromptLookup().may_draft([*PROMPT, 20, 20, 20])


def test_of_several_places_the_last_one_counts() -> None:
    assert PromptLookup().draft([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1) == (5,)


def test_nothing_is_drafted_without_earlier_output() -> None:
    lookup = PromptLookup()
    assert lookup.draft(PROMPT, 4) == ()
    assert lookup.draft([1, 2], 4) == ()
    assert lookup.draft([*PROMPT, 1, 2, 3], 0) == ()


def test_it_indexes_the_output_as_it_grows() -> None:
    lookup = PromptLookup()
    token_ids = [*PROMPT]
    drafts = []
    for token in [*PROMPT, 1]:
        drafts.append(lookup.draft(token_ids, 1))
        token_ids.append(token)
    assert drafts == [(), (), (), (4,), (5,), (6,), (7,), (8,), (1,)]


def test_drafts_grow_while_they_are_right() -> None:
    lookup = PromptLookup()
    token_ids = [*PROMPT, 1, 2, 3]
    lengths = []
    for _ in range(3):
        draft = lookup.draft(token_ids, 8)
        lengths.append(len(draft))
        lookup.record(len(token_ids), len(draft), len(draft))
    assert lengths == [2, 4, 8]
    lookup.record(len(token_ids), 8, 2)
    assert len(lookup.draft(token_ids, 8)) == 3


def test_after_wrong_drafts_there_are_none_for_a_while_twice_as_long_each_time() -> None:
    lookup = PromptLookup()
    token_ids = [1, 2, 3]
    attempts = []
    for _ in range(40):
        token_ids.append(len(token_ids) % 3 + 1)
        if draft := lookup.draft(token_ids, 4):
            attempts.append(len(token_ids))
            assert len(draft) == (2 if len(attempts) == 1 else 1)
            lookup.record(len(token_ids) + 1, len(draft), 0)
    assert attempts[0] == 6
    assert [b - a for a, b in pairwise(attempts)] == [3, 5, 9, 17]
