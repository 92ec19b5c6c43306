"""Tokens that contain a text."""

from hypothesis import given, strategies as st

from batching.constraints.token_texts import TokenTexts

texts = st.text(st.sampled_from("aäb\n"), max_size=4)


@given(st.lists(texts, max_size=8), texts.filter(bool))
def test_tokens_are_those_that_contain_all_of_the_text(tokens: list[str], text: str) -> None:
    """A text may begin in one token and end in the next, or be longer than all of them."""
    found = TokenTexts([token.encode() for token in tokens]).containing(text)
    assert found == {i for i, token in enumerate(tokens) if text in token}
