"""Prompts for the text between a prefix and a suffix, in the tokens that a model was trained with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from app.parsing.grammars.marker_tokens import tokens_of
from batching import InvalidRequest, ModelInfo


@dataclass(frozen=True, slots=True)
class FillInMarkers:
    """The markers of a family of models; an empty one is none.

    suffix_first: the suffix comes before the prefix.
    repository, file: stand before the name of a repository, and of each file in it.
    ends: the further tokens that end what is filled in.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


_FAMILIES: Final = (
    # Qwen Coder, CodeGemma, Granite 4
    FillInMarkers(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        repository=("<|repo_name|>", "<|reponame|>"),
        file=("<|file_sep|>", "<|file_separator|>"),
        ends=("<|fim_pad|>", "<|cursor|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite Code, SmolLM
    FillInMarkers(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        repository=("<repo_name>", "<reponame>"),
        file=("<file_sep>", "<filename>"),
        ends=("<fim_pad>", "<|endoftext|>"),
    ),
    # CodeLlama
    FillInMarkers("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    # DeepSeek
    FillInMarkers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),  # noqa: RUF001
    # Codestral
    FillInMarkers("[PREFIX]", "[SUFFIX]", suffix_first=True),
)


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
    repository: int | None
    file: int | None
    ends: tuple[int, ...]


class FillInPrompt(NamedTuple):
    """`ends` are tokens that end the completion, besides the model's own."""

    token_ids: list[int]
    ends: tuple[int, ...]


def fill_in_tokens(model: ModelInfo) -> FillInTokens | None:
    """Return the tokens with which a model fills in; None if its vocabulary has none."""
    for family in _FAMILIES:
        texts = (family.prefix, family.suffix, family.middle)
        others = (*family.repository, *family.file, *family.ends)
        found = tokens_of(model.tokenizer, filter(None, (*texts, *others)))
        if all(text in found for text in filter(None, texts)):
            files = [found[text] for text in family.file if text in found]
            return FillInTokens(
                found[family.prefix],
                found[family.suffix],
                found.get(family.middle),
                family.suffix_first,
                next((found[text] for text in family.repository if text in found), None),
                next(iter(files), None),
                tuple(found[text] for text in family.ends if text in found) + tuple(files),
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
    after = [tokens.suffix, *encoded(suffix)]
    parts = [*after, *before] if tokens.suffix_first else [*before, *after]
    middle = [] if tokens.middle is None else [tokens.middle]
    begin = [t for t in model.tokenizer.encode("") if t not in model.eos_token_ids]
    return FillInPrompt([*begin, *files(), *parts, *middle], tokens.ends)
