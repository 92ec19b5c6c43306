"""Prompts for the text between a prefix and a suffix, in the tokens that a model was trained with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import Final, Literal, NamedTuple

from app.parsing.grammars.marker_tokens import tokens_of
from app.prompts.render import Truncation, completion_prompt
from batching import InvalidRequest, ModelInfo


@dataclass(frozen=True, slots=True)
class FillInMarkers:
    """The markers of a family of models; an empty one is none.

    suffix_first: the suffix comes before the prefix.
    joins_suffix: the suffix has no space that the tokenizer puts before a text.
    repository, file: stand before the name of a repository, and of each file in it.
    ends: the tokens besides the markers that end what is filled in.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    joins_suffix: bool = False
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


# As their publishers have them; CodeLlama's and Codestral's suffix as their reference tokenizers.
_FAMILIES: Final = (
    # Qwen Coder, CodeGemma, Granite 4
    FillInMarkers(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        repository=("<|repo_name|>", "<|reponame|>"),
        file=("<|file_sep|>", "<|file_separator|>", "<|filename|>"),
        ends=("<|fim_pad|>", "<|cursor|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite Code, Mellum
    FillInMarkers(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        repository=("<repo_name>", "<reponame>"),
        file=("<file_sep>", "<filename>"),
        ends=("<fim_pad>", "<|endoftext|>"),
    ),
    # SantaCoder
    FillInMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),
    # CodeLlama
    FillInMarkers("▁<PRE>", "▁<SUF>", "▁<MID>", joins_suffix=True, ends=("▁<EOT>",)),
    # DeepSeek
    FillInMarkers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),  # noqa: RUF001
    # Seed Coder
    FillInMarkers("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # Codestral
    FillInMarkers("[PREFIX]", "[SUFFIX]", suffix_first=True, joins_suffix=True),
)
# The names of models with the markers of others, whose suffix comes first nevertheless.
_SUFFIX_FIRST: Final = ("mellum",)
# A token of its own in the vocabularies of CodeLlama and Codestral, which takes the space before a text.
_BEFORE_SUFFIX: Final = "☺"


class ExtraFile(NamedTuple):
    """A file of the same project, which stands before the prefix."""

    name: str
    text: str


class FillInTokens(NamedTuple):
    """The tokens of a model's markers; None where it has none."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    joins_suffix: bool
    repository: int | None
    file: int | None
    ends: tuple[int, ...]


class FillInPrompt(NamedTuple):
    """ends: tokens that end the completion, besides the model's own.  is_cut: not all texts are in the prompt."""

    token_ids: list[int]
    ends: tuple[int, ...]
    is_cut: bool = False


def fill_in_tokens(model: ModelInfo) -> FillInTokens | None:
    """Return the tokens with which a model fills in; None if its vocabulary has none."""
    name = model.model_id.lower()
    for family in _FAMILIES:
        texts = [text for text in (family.prefix, family.suffix, family.middle) if text]
        others = (*family.repository, *family.file, *family.ends)
        found = tokens_of(model.tokenizer, (*texts, *others))
        if all(text in found for text in texts):
            return FillInTokens(
                found[family.prefix],
                found[family.suffix],
                found.get(family.middle),
                family.suffix_first or any(each in name for each in _SUFFIX_FIRST),
                family.joins_suffix,
                next((found[text] for text in family.repository if text in found), None),
                next((found[text] for text in family.file if text in found), None),
                tuple(found.values()),
            )
    return None


def fill_in_prompt(
    model: ModelInfo,
    param: str,
    prefix: str,
    suffix: str,
    extra: Sequence[ExtraFile] = (),
    num_reserved: int | None = None,
) -> FillInPrompt:
    """Return the prompt for what stands between two texts; blocking.

    num_reserved: texts that leave no room for so many tokens of output, or for half the context, are cut: the end of
        the prefix is kept, of the suffix the beginning, which has at least a quarter, and as many of the last files as
        there is room for.  None cuts nothing.

    Raises:
        InvalidRequest: the model was not trained for it; `param` is the field that asks for it.
        PromptTooLong: a text cannot fit in the context, and is not truncated.
    """
    tokens = model.derived(fill_in_tokens)
    if tokens is None:
        message = f"the model '{model.model_id}' has no tokens to fill in text between two others"
        raise InvalidRequest(param, message)
    begin = [t for t in model.tokenizer.encode("") if t not in model.eos_token_ids]
    middle = [] if tokens.middle is None else [tokens.middle]
    num_markers = len(begin) + 2 + len(middle)
    room = None
    if num_reserved is not None:
        limit = model.max_model_len
        room = max(1, limit - min(num_reserved, limit // 2) - num_markers)
    encode = partial(_encoded, model, room)
    before, after = encode(prefix), _suffix(tokens, partial(encode, side="right"), suffix)
    num_whole = len(before) + len(after)
    if room is not None:
        after = after[: max(room // 4, room - len(before))]
        before = before[max(0, len(before) - (room - len(after))) :]
        room -= len(before) + len(after)
    files = _last_files(tokens, encode, extra, room)
    parts = [[tokens.prefix, *before], [tokens.suffix, *after]]
    if tokens.suffix_first:
        parts.reverse()
    return FillInPrompt(
        [*begin, *chain(*files), *chain(*parts), *middle],
        tokens.ends,
        len(before) + len(after) < num_whole or len(files) < len(extra),
    )


def _encoded(
    model: ModelInfo, room: int | None, text: str, side: Literal["left", "right"] = "left"
) -> list[int]:
    """Return the tokens of a text; of one that certainly has more than `room` only so many."""
    # One more shows that it is too long, and two may stand before a suffix.
    truncation = None if room is None else Truncation(room + 3, 0, side)
    return completion_prompt(model, text, add_special_tokens=False, truncation=truncation)


def _suffix(tokens: FillInTokens, encode: Callable[[str], list[int]], text: str) -> list[int]:
    if not tokens.joins_suffix:
        return encode(text)
    return encode(_BEFORE_SUFFIX + text)[len(encode(_BEFORE_SUFFIX)) :]


def _last_files(
    tokens: FillInTokens,
    encode: Callable[[str], list[int]],
    extra: Sequence[ExtraFile],
    room: int | None,
) -> list[list[int]]:
    """Return the tokens of as many of the last files as have room; the first and the last one with what is around all."""
    begin = [tokens.repository, *encode("project\n")] if tokens.repository is not None else []
    marker = [tokens.file] if tokens.file is not None else []
    end = [*marker, *encode("filename\n")] if marker else []
    num_left = inf if room is None else room - len(begin) - len(end)
    files: list[list[int]] = []
    for file in reversed(extra):
        files.insert(0, [*marker, *encode(f"{file.name}\n{file.text}\n")])
        num_left -= len(files[0])
        if num_left < 0:
            del files[0]
            break
    if files:
        files[0] = [*begin, *files[0]]
        files[-1] = [*files[-1], *end]
    return files
