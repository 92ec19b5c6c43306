"""Reasoning before constrained content, in each format of reasoning."""

from collections.abc import Sequence
from typing import Any

import pytest

from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece, join_pieces
from app.parsing.formats.marked_format import MarkedFormat
from app.parsing.formats.model_format import message_format
from app.parsing.message_format import MessageSpec
from app.parsing.output_format import GrammarSpec, OutputFormat
from app.parsing.reasoning.reasoning_markers import ReasoningMarkers, reasoning_markers
from batching import GrammarText, ThinkingBudget, choice_grammar
from batching.constraints.grammar import GrammarCompiler
from tests.support.marker_tokenizer import MarkerTokenizer
from tests.support.rows import rows
from tests.support.thinking import allowed

YES_OR_NO = GrammarSpec(choice_grammar(["yes", "no"]), "structured_outputs")
GEMMA = ("<|channel>thought", "<channel|>")
KIMI = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")


def inferred(*markers: str, special: Sequence[str] = ()) -> MarkerTokenizer:
    """Return the tokenizer of a model whose markers mlx-lm infers."""
    start, end = markers
    return MarkerTokenizer(special=special, plain=() if special else markers, think=(start, end))


FORMATS: dict[str, tuple[MarkerTokenizer, str, str]] = {
    "think": (inferred("<think>", "</think>"), "<think>", "</think>"),
    "spelt": (MarkerTokenizer(think=("<think>", "</think>")), "<think>", "</think>"),
    "gemma": (inferred(*GEMMA, special=("<|channel>", "<channel|>")), *GEMMA),
    "kimi": (inferred(*KIMI, special=("<|open|>", "<|close|>", "<|sep|>")), *KIMI),
    "mistral": (MarkerTokenizer(special=("[THINK]", "[/THINK]")), "[THINK]", "[/THINK]"),
    "seed": (
        MarkerTokenizer(plain=("<seed:think>", "</seed:think>")),
        "<seed:think>",
        "</seed:think>",
    ),
    "kimi-vl": (MarkerTokenizer(plain=("◁think▷", "◁/think▷")), "◁think▷", "◁/think▷"),
    "template": (
        MarkerTokenizer(template="{# <think></think> #}{{ messages }}"),
        "<think>",
        "</think>",
    ),
    "words": (
        MarkerTokenizer(
            template="Write 'Here is my thought process:', then 'Here is my response:'."
        ),
        "Here is my thought process:",
        "Here is my response:",
    ),
}
formats = pytest.mark.parametrize(
    ("tokenizer", "start", "end"), FORMATS.values(), ids=FORMATS.keys()
)


def output(
    tokenizer: MarkerTokenizer, prompt: str = "user: Hi\nassistant:", **spec: Any
) -> OutputFormat:
    return message_format(tokenizer.model).output(MessageSpec(**spec), prompt)


def grammar(
    tokenizer: MarkerTokenizer, prompt: str = "user: Hi\nassistant:", **spec: Any
) -> GrammarText:
    asked = output(tokenizer, prompt, content=YES_OR_NO, **spec).grammar
    assert asked is not None and asked.param == "structured_outputs"
    return asked.grammar


def events(output_: OutputFormat, text: str) -> list[MessageEvent]:
    """Return what is read of a text, which does not depend on how that is split."""
    whole, split = output_.new_parser(), output_.new_parser()
    found = join_pieces([*whole.add(text), *whole.flush()])
    pieces = [event for character in text for event in split.add(character)]
    assert join_pieces([*pieces, *split.flush()]) == found
    return found


@formats
def test_reasoning_is_parsed_and_its_markers_are_seen(
    tokenizer: MarkerTokenizer, start: str, end: str
) -> None:
    of = output(tokenizer)
    assert events(of, f"{start}\nHm.\n{end}\n\nyes") == [ReasoningPiece("Hm."), ContentPiece("yes")]
    assert events(of, "yes") == [ContentPiece("yes")]
    assert (
        tokenizer.special_ids.intersection(tokenizer.encode(start + end)) == of.visible_special_ids
    )
    inside = output(tokenizer, f"user: Hi\nassistant:{start}\n")
    assert events(inside, f"Hm.\n{end}\nyes") == [ReasoningPiece("Hm."), ContentPiece("yes")]


@formats
def test_reasoning_comes_before_what_a_grammar_asks_for(
    tokenizer: MarkerTokenizer, start: str, end: str
) -> None:
    asked = grammar(tokenizer)
    assert tokenizer.allows("yes", asked)
    assert tokenizer.allows(f"{start}\nI {{could}} < say.\n{end}\n\nyes", asked)
    for text in (
        f"{start}hm{end}oops",
        f"{start}hm",
        f"hm{end}yes",
        f"{start}a{end}{start}b{end}no",
    ):
        assert not tokenizer.allows(text, asked)


@formats
def test_a_prompt_that_begins_the_reasoning(
    tokenizer: MarkerTokenizer, start: str, end: str
) -> None:
    asked = grammar(tokenizer, f"user: Hi\nassistant:{start}\n")
    assert tokenizer.allows(f"hm\n{end}\n\nyes", asked)
    assert tokenizer.allows(f"{end}no", asked)
    for text in (f"hm{end}oops", "hm yes", "yes"):
        assert not tokenizer.allows(text, asked)


@formats
def test_a_prompt_that_ended_the_reasoning(
    tokenizer: MarkerTokenizer, start: str, end: str
) -> None:
    prompt = f"user: Hi\nassistant:{start}\n\n{end}\n\n"
    asked = grammar(tokenizer, prompt)
    assert tokenizer.allows("yes", asked)
    assert not tokenizer.allows(f"{start}hm{end}yes", asked)
    assert events(output(tokenizer, prompt), "yes") == [ContentPiece("yes")]


@formats
def test_what_the_user_says_of_markers_is_no_reasoning(
    tokenizer: MarkerTokenizer, start: str, end: str
) -> None:
    prompt = f"user: What is {start} for?\nassistant:"
    assert events(output(tokenizer, prompt), "yes") == [ContentPiece("yes")]


@rows(
    ("begun", "is_open"),
    [("<think>\nI a", True), ("<think>I a</think>ye", False), ("ye", False), ("", False)],
)
def test_a_message_that_is_continued_may_be_inside_the_reasoning(begun: str, is_open: bool) -> None:
    tokenizer, _, end = FORMATS["think"]
    of = output(tokenizer, f"user: Hi\nassistant: {begun}", begun=begun)
    kind = ReasoningPiece if is_open else ContentPiece
    assert events(of, f"m.{end}s") == join_pieces([kind("m."), ContentPiece("s")])
    asked = grammar(tokenizer, f"user: Hi\nassistant: {begun}", begun=begun)
    assert tokenizer.allows(f"m.{end}no", asked) is is_open
    # Reasoning does not begin again.
    assert tokenizer.allows(f"<think>m.{end}no", asked) is ("<think>" not in begun)


def test_a_spelt_end_ends_the_reasoning_as_its_token_does() -> None:
    for name in ("think", "gemma", "kimi", "mistral"):
        tokenizer, start, end = FORMATS[name]
        asked = grammar(tokenizer, f"assistant:{start}")
        assert tokenizer.allows(f"hm{end}yes", asked, spelt=True)
        assert not tokenizer.allows(f"hm{end}oops{end}yes", asked, spelt=True)


AROUND = ReasoningMarkers("<think>", "</think>", "<response>", ("</response>",))


def test_markers_around_the_content_are_no_part_of_it() -> None:
    template = "{# <think></think><response></response> #}{{ messages }}"
    tokenizer = MarkerTokenizer(template=template)
    assert reasoning_markers(tokenizer.model) == AROUND
    text = "<think>Say <response>?</think>\n<response>\nyes\n</response>"
    of = output(tokenizer)
    assert events(of, text) == [ReasoningPiece("Say <response>?"), ContentPiece("yes")]
    assert events(of, "yes\n") == [ContentPiece("yes\n")]
    assert events(of, "<think>hm\n") == [ReasoningPiece("hm\n")]
    asked = grammar(tokenizer)
    assert tokenizer.allows(text, asked)
    assert tokenizer.allows("yes", asked)
    assert not tokenizer.allows("<response>oops</response>", asked)


def test_kimi_k3_writes_its_content_between_markers() -> None:
    tokenizer, start, end = FORMATS["kimi"]
    response = "<|open|>response<|sep|>yes<|close|>response<|sep|><|close|>message<|sep|>"
    assert events(output(tokenizer), f"{start}hm{end}{response}") == [
        ReasoningPiece("hm"),
        ContentPiece("yes"),
    ]
    assert tokenizer.allows(f"{start}hm{end}{response}", grammar(tokenizer))
    assert not tokenizer.allows(response.replace("yes", "oops"), grammar(tokenizer))


def test_a_model_without_markers_does_not_reason() -> None:
    tokenizer = MarkerTokenizer(template="<think> alone means nothing")
    assert reasoning_markers(tokenizer.model) is None
    of = output(tokenizer)
    assert events(of, "<think>hm</think>") == [ContentPiece("<think>hm</think>")]
    assert isinstance(message_format(tokenizer.model), MarkedFormat)
    assert output(tokenizer, content=YES_OR_NO).grammar == YES_OR_NO


@formats
@pytest.mark.parametrize("prompt", ["user: Hi\nassistant:", "open"])
def test_a_thought_ends_with_its_budget(
    tokenizer: MarkerTokenizer, start: str, end: str, prompt: str
) -> None:
    """What is forced is what the parser takes for the end."""
    is_open = prompt == "open"
    format_ = output(tokenizer, start if is_open else prompt, thinking_budget=3)
    assert format_.thinking is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens, tokenizer.end_token_ids)
    matcher = ThinkingBudget(format_.thinking, None, compiler.token_bytes).matcher()
    own = [*([] if is_open else tokenizer.encode(start)), *b"abcdef"]
    said: list[int] = []
    while own:
        may_follow = allowed(matcher, tokenizer.num_tokens)
        said.append(own.pop(0) if len(may_follow) > 1 else may_follow[0])
        matcher.accept(said[-1])
    text = tokenizer.decode(said)
    assert text == f"{'' if is_open else start}abc{end}def"
    assert events(format_, text) == [ReasoningPiece("abc"), ContentPiece("def")]
