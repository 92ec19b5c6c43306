"""Images in rendered prompts: what templates write for one, and where the tokens are."""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from app.parsing.formats.model_format import message_format
from app.prompts.chat import prepare_chat
from app.prompts.conversation import Breakpoint, ChatMessage, Conversation
from app.prompts.images.image_marks import FileSource, ImageSource, Source, joined
from app.prompts.images.image_places import ImageText, image_text
from app.prompts.render import Attached, ChatPrompt, PromptTooLong, Truncation, chat_prompt
from app.prompts.templates.template_sandbox import TemplateTooMuch
from batching import ImageInput, InvalidRequest, ModelInfo
from tests.support.fake_images import BEGIN, FINISH, IMAGE, VISION, WRITTEN, SeeingTokenizer, shown
from tests.support.rows import rows

ONE: Final = ImageSource("1")
TWO: Final = ImageSource("2")
NOTES: Final = FileSource("file-1")


def made(num_rows: int) -> ImageInput:
    ids = (BEGIN, *[IMAGE] * num_rows, FINISH)
    return ImageInput(ids, tuple(range(1, num_rows + 1)), ())


ATTACHED: Final[dict[str, Attached]] = {ONE.mark: made(1), TWO.mark: made(2), NOTES.mark: "notes"}


class Template(SeeingTokenizer):
    """A template of a test's own for the content of a turn."""

    def __init__(self, write: Any) -> None:
        self._write = write

    def content(self, content: Any) -> str:
        written: str = self._write(content)
        return written


def model(tokenizer: SeeingTokenizer | None = None) -> ModelInfo:
    known = tokenizer or SeeingTokenizer()
    return ModelInfo(
        "fake", known, known.end_token_ids, known.num_tokens, max_model_len=400, vision=VISION
    )


def first(content: Any) -> str:
    """Write images before all else, as Gemma's and Llama's templates do."""
    if isinstance(content, str):
        return str(content)
    texts = [part["text"] for part in content if part["type"] == "text"]
    num_images = len([part for part in content if part["type"] == "image"])
    return WRITTEN * num_images + "".join(texts)


def prompt(
    *parts: str | Source,
    tokenizer: SeeingTokenizer | None = None,
    truncation: Truncation | None = None,
    attached: dict[str, Attached] = ATTACHED,
) -> ChatPrompt:
    turn = ChatMessage(role="user", content=joined(parts))
    described = model(tokenizer)
    conversation = Conversation(messages=[turn])
    return chat_prompt(described, conversation, message_format(described), truncation, attached)


def text_of(made: ChatPrompt) -> str:
    for placed in made.images:
        assert tuple(made.token_ids[placed.start : placed.stop]) == placed.image.token_ids
    return shown(made.token_ids)


def test_images_are_where_their_parts_are() -> None:
    made = prompt("a", ONE, "b", TWO, ONE)
    assert text_of(made) == "user: a(1)b(2)(1)\nassistant:"
    assert made.text == f"user: a{WRITTEN}b{WRITTEN}{WRITTEN}\nassistant:"


def test_a_template_may_write_images_first() -> None:
    described = model(Template(first))
    assert image_text(described) == ImageText(WRITTEN, is_first=True)
    assert image_text(model()) == ImageText(WRITTEN, is_first=False)
    assert text_of(prompt("a", ONE, "b", TWO, tokenizer=Template(first))) == (
        "user: (1)(2)ab\nassistant:"
    )


def broken(content: Any) -> str:
    if isinstance(content, str):
        return content
    raise TypeError("no list")


@rows(
    "write",
    [
        lambda content: (
            content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
        ),
        broken,
    ],
)
def test_a_template_that_writes_nothing_takes_no_images(write: Any) -> None:
    with pytest.raises(InvalidRequest, match="writes nothing for an image"):
        prompt(ONE, tokenizer=Template(write))


def test_a_template_that_takes_too_much_is_no_answer() -> None:
    def endless(content: Any) -> str:
        raise TemplateTooMuch

    with pytest.raises(TemplateTooMuch):
        image_text(model(Template(endless)))


def test_a_template_that_drops_an_image_is_noticed() -> None:
    def cut(content: Any) -> str:
        return (
            content[:70]
            if isinstance(content, str)
            else "".join(p.get("text", WRITTEN) for p in content)
        )

    with pytest.raises(InvalidRequest, match="leaves out images: 1 of 2 are left"):
        prompt(ONE, TWO, tokenizer=Template(cut))


def test_a_template_that_writes_an_image_twice_is_noticed() -> None:
    def twice(content: Any) -> str:
        return (
            content * 2
            if isinstance(content, str)
            else "".join(p.get("text", WRITTEN) for p in content)
        )

    with pytest.raises(InvalidRequest, match="leaves out images: 2 of 1 are left"):
        prompt(ONE, tokenizer=Template(twice))


def test_typed_placeholders_are_text() -> None:
    found = prompt(f"{WRITTEN}<image>", ONE, "<begin", ">")
    assert text_of(found) == f"user: {WRITTEN}<image>(1)<begin\n>\nassistant:"
    assert found.token_ids.count(IMAGE) == 1


def test_marks_that_stand_for_nothing_are_text() -> None:
    other = ImageSource("3").mark
    found = prompt(f"a{other}", ONE)
    assert f"a{other}(1)" in shown_bytes(found.token_ids)
    assert other in found.text


def shown_bytes(token_ids: Sequence[int]) -> str:
    """Return a prompt as `shown` does, with text beyond ASCII."""
    names = {BEGIN: b"(", FINISH: b")", IMAGE: b"1"}
    return b"".join(names.get(i) or bytes([i]) for i in token_ids).decode()


def test_a_file_is_its_text() -> None:
    assert text_of(prompt("a", NOTES, "b", ONE)) == "user: a\nnotes\nb(1)\nassistant:"
    found = prompt("a", NOTES, attached={NOTES.mark: "notes"})
    assert (found.text, found.images) == ("user: a\nnotes\n\nassistant:", ())


def test_a_tokenizer_without_added_tokens_has_no_placeholders() -> None:
    class NoneAdded(SeeingTokenizer):
        def get_added_vocab(self) -> dict[str, int]:
            return {}

    assert "(1)" in text_of(prompt(ONE, tokenizer=NoneAdded()))


def test_what_fits_is_not_cut_and_what_does_not_is_refused() -> None:
    assert prompt(ONE, truncation=Truncation(None, 10)).images
    with pytest.raises(InvalidRequest, match="cannot be truncated") as caught:
        prompt("a" * 50, ONE, truncation=Truncation(40, 10))
    assert caught.value.param == "truncate_prompt_tokens"


def test_a_text_that_is_too_long_is_not_tokenized() -> None:
    class Known(SeeingTokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert len(text) < 400, "it is too long"
            return super().encode(text)

    with pytest.raises(PromptTooLong):
        prompt("a" * 400, ONE, tokenizer=Known())
    # A mark has more characters than its image has tokens.
    assert prompt("a" * 350, ONE, tokenizer=Known()).images


@rows(
    ("parts", "num_parts", "expected"),
    [
        (["a", ONE, "b", TWO], 2, "user: a(1)"),
        (["a", ONE, "b", TWO], 3, "user: a(1)b"),
        ([TWO, "a", NOTES, "b"], 3, "user: (2)a\nnotes\n"),
        ([NOTES, "b"], 1, "user: \nnotes\n"),
    ],
)
def test_what_is_retained_may_end_behind_an_image_or_a_file(
    parts: list[str | Source], num_parts: int, expected: str
) -> None:
    end = Breakpoint(len(joined(parts[:num_parts])), 60)
    turn = ChatMessage(role="user", content=joined(parts), breakpoints=[end])
    for tokenizer in (SeeingTokenizer(), Template(first)):
        made = prepare_chat(model(tokenizer), Conversation(messages=[turn]), attached=ATTACHED)
        ((num_tokens, seconds),) = made.retained
        assert seconds == 60
        if not isinstance(tokenizer, Template):
            assert shown(made.prompt.token_ids[:num_tokens]) == expected
        assert num_tokens
