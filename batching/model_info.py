"""What a loaded model tells the layer above, without a tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that serving text needs.

    mlx-lm's TokenizerWrapper is one.  `Any` stands where templates take what clients send.
    """

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`max_model_len` is in tokens, prompt and output together."""

    model_id: str
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
