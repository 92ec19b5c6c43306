"""Tool formats of a tokenizer in which every byte and every marker is a token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.tool_parsers import json_tools, mistral, qwen3_coder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from app.parsing.tool_format import ToolFormat, tool_format
from batching import ModelInfo
from batching.constraints.grammar import GrammarCompiler

END: Final = "<|end|>"
START_OF_CALL, END_OF_CALL = "<tool_call>", "</tool_call>"


def vocabulary() -> Tokenizer:
    """Every byte is a token, and so is every marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: index for index, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "[TOOL_CALLS]", "[ARGS]"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    plain = [START_OF_CALL, END_OF_CALL]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer


@dataclass
class TemplateTokenizer:
    """What mlx-lm knows of a model's tokenizer; its template is never rendered here."""

    backend_tokenizer: Tokenizer
    chat_template: str | None = None
    tool_call_start: str | None = None
    tool_call_end: str | None = None
    tool_parser: Any = None
    has_chat_template = True
    has_thinking = False
    think_start = None
    think_end = None
    all_special_ids: tuple[int, ...] = ()

    @property
    def has_tool_calling(self) -> bool:
        return self.tool_parser is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=False))

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        raise NotImplementedError


VOCABULARY = vocabulary()
VOCAB_SIZE: Final = VOCABULARY.get_vocab_size()
END_ID: Final = VOCABULARY.get_vocab()[END]
COMPILER = GrammarCompiler(TemplateTokenizer(VOCABULARY), VOCAB_SIZE, frozenset({END_ID}))


def format_of(module: Any = None, template: str | None = "{{ tools }}") -> ToolFormat:
    """Return the format of a model for which mlx-lm has this parser."""
    tokenizer = TemplateTokenizer(VOCABULARY, template)
    if module is not None:
        tokenizer.tool_parser = module.parse_tool_call
        tokenizer.tool_call_start = module.tool_call_start
        tokenizer.tool_call_end = module.tool_call_end
    return tool_format(ModelInfo("m", tokenizer, frozenset({END_ID}), VOCAB_SIZE, 1024))


GENERAL = format_of(None)
JSON = format_of(json_tools)
CODER = format_of(qwen3_coder)
MISTRAL = format_of(mistral, "{{ tools }} [TOOL_CALLS]")
MISTRAL_ARGS = format_of(mistral, "{{ tools }} [TOOL_CALLS] [ARGS]")
