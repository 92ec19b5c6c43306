"""A tokenizer of bytes with markers of texts to fill in."""

from collections.abc import Sequence
from typing import Final

from batching import ModelInfo
from tests.support.speaker import END, MODEL_ID, ByteTokenizer

QWEN: Final = (
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|repo_name|>",
    "<|file_sep|>",
)


class Marked(ByteTokenizer):
    """Has markers as tokens of their own, beyond the bytes."""

    def __init__(self, *markers: str) -> None:
        self.markers = {text: END + 1 + index for index, text in enumerate(markers)}
        self.num_tokens = END + 1 + len(markers)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.markers[text]] if text in self.markers else super().encode(text)

    def shown(self, token_ids: Sequence[int]) -> str:
        names = {token_id: text for text, token_id in self.markers.items()}
        return "".join(names.get(each) or chr(each) for each in token_ids)


def model_of(
    tokenizer: ByteTokenizer, model_id: str = MODEL_ID, *, max_model_len: int = 2048
) -> ModelInfo:
    return ModelInfo(model_id, tokenizer, frozenset({END}), tokenizer.num_tokens, max_model_len)
