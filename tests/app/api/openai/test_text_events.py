"""Deltas of text are written as their chunks are, byte for byte."""

import pytest
from hypothesis import given, strategies as st

from app.api.openai.chat.response_builder import ChatResponseBuilder
from app.api.openai.completions.response_builder import CompletionResponseBuilder
from app.api.openai.response_builder import ResponseBuilder, TextEvents, common_fields
from app.api.openai.schemas.response_options import ResponseOptions, StreamOptions
from app.generation.choice import Delta, TokenWithLogprob
from app.parsing.events import ContentPiece, ReasoningPiece, ToolCallArguments, ToolCallStart
from batching import FinishReason, TokenLogprobs
from tests.support.rows import rows

# A name that needs escapes itself, and looks like the text of a chunk.
COMMON = common_fields("id-1", 'a "content":"" \\ model') | {"service_tier": "default"}
OPTIONS = [
    ResponseOptions(),
    ResponseOptions(stream=True, stream_options=StreamOptions(include_usage=True)),
]


def no_bytes(token_id: int) -> bytes:
    raise AssertionError("no log probabilities are written")


def chat(options: ResponseOptions, *, include_reasoning: bool = True) -> ChatResponseBuilder:
    return ChatResponseBuilder(
        common_fields=COMMON,
        options=options,
        prompt=(1,),
        include_reasoning=include_reasoning,
        include_logprobs=False,
        token_bytes=no_bytes,
    )


def completions(options: ResponseOptions) -> CompletionResponseBuilder:
    return CompletionResponseBuilder(
        common_fields=COMMON,
        options=options,
        prompts=[(1,)],
        num_returned=2,
        num_candidates=2,
        token_bytes=no_bytes,
    )


BUILDERS: list[ResponseBuilder] = [
    *map(chat, OPTIONS),
    chat(OPTIONS[0], include_reasoning=False),
    *map(completions, OPTIONS),
]


@given(
    pieces=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from([ContentPiece, ReasoningPiece]),
            st.text(min_size=1) | st.sampled_from(['"', "\\", "\n\n", "\u2028", "\x00", "é😀"]),
        )
    )
)
@pytest.mark.parametrize("builder", BUILDERS)
def test_deltas_of_text_are_written_as_their_chunks_are(
    builder: ResponseBuilder, pieces: list[tuple[int, type[ContentPiece | ReasoningPiece], str]]
) -> None:
    text_events = TextEvents(builder)
    for index, kind, text in pieces:
        delta = Delta(index, events=[kind(text)], token_ids=(5,))
        assert text_events.can_write(delta)
        chunks = builder.delta_chunks(delta)
        assert list(text_events.write(delta)) == [
            f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode() for chunk in chunks
        ]


PIECE = ContentPiece("a")


@rows(
    "delta",
    [
        Delta(0, is_first=True, events=[PIECE]),
        Delta(0),
        Delta(0, events=[PIECE, ReasoningPiece("b")]),
        Delta(0, events=[ToolCallStart(0, "call", "f")]),
        Delta(0, events=[ToolCallArguments(0, "{}")]),
        Delta(0, events=[PIECE], tokens=[TokenWithLogprob(0, 0, TokenLogprobs(-1.0))]),
        Delta(0, events=[PIECE], finish_reason=FinishReason.LENGTH),
    ],
)
def test_deltas_with_more_than_text_are_not(delta: Delta) -> None:
    assert not TextEvents(chat(OPTIONS[0])).can_write(delta)


def test_tokens_in_chunks_are_more_than_text() -> None:
    builder = chat(ResponseOptions(return_token_ids=True))
    assert not TextEvents(builder).can_write(Delta(0, events=[PIECE]))
