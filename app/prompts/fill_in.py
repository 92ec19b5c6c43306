"""Prompts for the text between a prefix and a suffix, in the tokens that a model was trained with."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from app.parsing.grammars.marker_tokens import tokens_of
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
    # GLM 4.5
    FillInMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
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
    """`ends` are tokens that end the completion, besides the model's own."""

    token_ids: list[int]
    ends: tuple[int, ...]


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
    model: ModelInfo, param: str, prefix: str, suffix: str, extra: Sequence[ExtraFile] = ()
) -> FillInPrompt:
    """Return the prompt for what stands between two texts; blocking.

    Raises:
        InvalidRequest: the model was not trained for it; `param` is the field that asks for it.
    """
    tokens = model.derived(fill_in_tokens)
    if tokens is None:
        message = f"the model '{model.model_id}' has no tokens to fill in text between two others"
        raise InvalidRequest(param, message)

    def encoded(text: str) -> list[int]:
        return list(model.tokenizer.encode(text, add_special_tokens=False))

    def files() -> Iterable[int]:
        if extra and tokens.repository is not None:
            yield tokens.repository
            yield from encoded("project\n")
        for file in extra:
            if tokens.file is not None:
                yield tokens.file
            yield from encoded(f"{file.name}\n{file.text}\n")
        if extra and tokens.file is not None:
            yield tokens.file
            yield from encoded("filename\n")

    before = [tokens.prefix, *encoded(prefix)]
    after = [tokens.suffix, *(_joined(encoded, suffix) if tokens.joins_suffix else encoded(suffix))]
    parts = [*after, *before] if tokens.suffix_first else [*before, *after]
    middle = [] if tokens.middle is None else [tokens.middle]
    begin = [t for t in model.tokenizer.encode("") if t not in model.eos_token_ids]
    return FillInPrompt([*begin, *files(), *parts, *middle], tokens.ends)


def _joined(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the tokens of a text that follows another one."""
    return encode(_BEFORE_SUFFIX + text)[len(encode(_BEFORE_SUFFIX)) :]
