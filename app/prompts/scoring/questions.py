"""The prompts of typed questions about one input: a common beginning, and a short end for each.  Blocking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from string import ascii_uppercase, digits
from typing import Final, Literal, NamedTuple

from app.parsing.formats.model_format import message_format
from app.parsing.harmony.harmony_parser import CHANNEL, MESSAGE
from app.parsing.reasoning.reasoning_grammar import reasoning_state
from app.parsing.reasoning.reasoning_markers import reasoning_markers
from app.prompts.conversation import ChatMessage, Conversation
from app.prompts.render import Attached, chat_prompt, tokens_of
from batching import ContextLengthExceeded, InvalidRequest, ModelInfo, PlacedImage

INSTRUCTIONS: Final = "Read the input, then answer the question about it with one label only."
# A noncharacter of Unicode, which is for such uses, where each question is to stand.
_MARK: Final = "\ufdd4"
# So many characters before a text decide how it is tokenized.
_NUM_CONTEXT: Final = 32

_LABELS: Final = {
    "truth": ("Yes", "No"),
    "levels": tuple(digits),
    "options": (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))),
}
_ASKS: Final = {
    "truth": "Reply with Yes or No only.",
    "levels": "Reply with the number of the level that fits best.",
    "options": "Reply with the label of the option that fits best.",
}
MAX_LEVELS: Final = len(_LABELS["levels"])
MAX_OPTIONS: Final = 255  # OpenAI's


class Option(NamedTuple):
    """One of the answers that a question allows."""

    name: str
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a request.

    param: the field that has it, for errors.
    options: all answers; of a truth, yes and no, which may have descriptions only.
    """

    param: str
    kind: Literal["truth", "levels", "options"]
    instructions: str
    options: Sequence[Option]

    def text(self, labels: Sequence[str]) -> str:
        lines = [f"Question: {self.instructions}"]
        for label, option in zip(labels, self.options, strict=True):
            shown = ": ".join(filter(None, option))
            if shown:
                lines.append(f"{label}. {shown}")
        return "\n".join([*lines, _ASKS[self.kind]])


class Labelled(NamedTuple):
    """The end of a question's prompt, and the first tokens of its labels in the order of the options."""

    token_ids: list[int]
    label_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuestionPrompts:
    """All prompts of a request: `prefix`, followed by one of `ends`."""

    prefix: list[int]
    images: tuple[PlacedImage, ...]
    ends: Sequence[Labelled]


def question_prompts(
    model: ModelInfo,
    messages: Sequence[ChatMessage],
    questions: Sequence[Question],
    attached: Mapping[str, Attached],
    max_all_tokens: int,
) -> QuestionPrompts:
    """Render the input once, and tokenize each question behind it.

    attached: the images and files of the messages, by their marks.
    max_all_tokens: the most tokens of all prompts, of which the common beginning counts once.

    Raises:
        InvalidRequest: the model cannot answer, or has too few labels, or all is too long together.
        ContextLengthExceeded: a prompt does not fit in the context.
    """
    prompt = chat_prompt(model, _conversation(messages), message_format(model), attached=attached)
    before, mark, after = prompt.template_text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest("model", "the model's chat template leaves out the last message")
    writer = _EndWriter(model, before[-_NUM_CONTEXT:], after + _closed_reasoning(model, after))
    prefix = tokens_of(model, before, attached)
    ends: list[Labelled] = []
    num_tokens = len(prefix)
    for question in questions:
        end = writer.write(question)
        num_tokens += len(end.token_ids)
        # One more token says what the model makes of it.
        if (length := len(prefix) + len(end.token_ids)) >= model.max_model_len:
            raise ContextLengthExceeded(length, 1, model.max_model_len, question.param)
        if len(questions) > 1 and num_tokens > max_all_tokens:
            message = f"all prompts together may have at most {max_all_tokens} tokens"
            raise InvalidRequest("questions", message)
        ends.append(end)
    return QuestionPrompts(prefix, prompt.images, ends)


def _conversation(messages: Sequence[ChatMessage]) -> Conversation:
    """Return the input with instructions before it and the place of a question behind it."""
    turns = [ChatMessage(role="system", content=INSTRUCTIONS), *messages]
    if turns[-1].role == "user":
        turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{_MARK}")
    else:
        turns.append(ChatMessage(role="user", content=_MARK))
    return Conversation(messages=turns, reasoning_effort="none", thinking=False, adapt_turns=True)


def _closed_reasoning(model: ModelInfo, prompt: str) -> str:
    """Return what follows a prompt before the model's answer: the end of reasoning that it has begun."""
    if message_format(model).has_channels:
        return f"{CHANNEL}final{MESSAGE}"
    markers = reasoning_markers(model)
    is_open = markers is not None and reasoning_state(prompt, "", markers) == "open"
    return f"{markers.end}\n\n" if markers is not None and is_open else ""


class _EndWriter:
    """Writes the ends of prompts between two texts, of which all have the second one whole."""

    def __init__(self, model: ModelInfo, before: str, after: str) -> None:
        self._model, self._before, self._after = model, before, after
        self._known: dict[tuple[str, int], tuple[Sequence[str], tuple[int, ...]]] = {}

    def write(self, question: Question) -> Labelled:
        """Return the end of a question's prompt.

        Raises:
            InvalidRequest: the tokenizer has too few labels for all options.
        """
        key = question.kind, len(question.options)
        if key not in self._known:
            self._known[key] = self._labels(question)
        labels, label_ids = self._known[key]
        text = question.text(labels) + self._after
        return Labelled(self._encoded(self._before, text), label_ids)

    def _labels(self, question: Question) -> tuple[Sequence[str], tuple[int, ...]]:
        """Return labels that differ in their first tokens where the answer stands, and these."""
        found: dict[int, str] = {}
        for label in _LABELS[question.kind]:
            if len(found) == len(question.options):
                break
            found.setdefault(self._encoded(self._after[-_NUM_CONTEXT:], label)[0], label)
        if len(found) < len(question.options):
            message = f"this model's tokenizer has labels for {len(found)} options at most"
            raise InvalidRequest(question.param, message)
        return tuple(found.values()), tuple(found)

    def _encoded(self, before: str, text: str) -> list[int]:
        """Tokenize a text behind another one: some tokenizers put a space where a text begins."""
        encode = self._model.tokenizer.encode
        first = encode(before, add_special_tokens=False)
        whole = encode(before + text, add_special_tokens=False)
        if whole[: len(first)] == first:
            return whole[len(first) :]
        return encode(text, add_special_tokens=False)
