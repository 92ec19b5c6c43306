"""Inputs of embeddings to tokens.  Blocking, so not for the event loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.prompts.length_bound import longest_token
from app.prompts.render import NUM_CONTEXT_TOKENS, PromptTooLong, Truncation, completion_prompt
from batching import InputTooLong, InvalidRequest, ModelInfo, check_input


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReader:
    """Tokenizes the inputs of one request.

    max_tokens: the most tokens of an input; a longer one is an error, unless it is truncated.
    max_all_tokens: the most tokens of all inputs together, if there are several.
    truncation: cuts the text's own tokens; special ones around them stay.
    """

    model: ModelInfo
    max_tokens: int
    max_all_tokens: int
    truncation: Truncation | None = None
    add_special_tokens: bool = True

    def read(self, param: str, inputs: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Return the tokens of each input.

        Raises:
            InvalidRequest, InputTooLong: an input cannot be read; the error names it.
        """
        read: list[list[int]] = []
        num_tokens = 0
        for index, value in enumerate(inputs):
            name = f"{param}.{index}" if len(inputs) > 1 else param
            read.append(self._tokens(name, value))
            num_tokens += len(read[-1])
            # Before the next one is tokenized, which is what takes time.
            if len(inputs) > 1 and num_tokens > self.max_all_tokens:
                message = f"all inputs together may have at most {self.max_all_tokens} tokens"
                raise InvalidRequest(param, message)
        return read

    def _tokens(self, param: str, value: str | Sequence[int]) -> list[int]:
        try:
            tokens = self._encoded(value)
        except PromptTooLong as error:
            raise InputTooLong(error.num_prompt_tokens, self.max_tokens, param) from None
        check_input(self.model, param, tokens, self.max_tokens)
        return tokens

    def _encoded(self, value: str | Sequence[int]) -> list[int]:
        adds = self.add_special_tokens
        if self.truncation is None:
            return completion_prompt(self.model, value, add_special_tokens=adds)
        limit = self._kept()
        if not isinstance(value, str):
            return _cut(value, limit, self.truncation)
        text = self._short_enough(value, limit)
        whole = self.model.tokenizer.encode(text, add_special_tokens=adds)
        if len(whole) <= limit:
            return whole
        plain = self.model.tokenizer.encode(text, add_special_tokens=False)
        before, after = _around(whole, plain)
        room = max(0, limit - len(before) - len(after))
        return [*before, *_cut(plain, room, self.truncation), *after][:limit]

    def _kept(self) -> int:
        """Return how many tokens of an input are kept."""
        assert self.truncation is not None, "something is truncated"
        num_tokens = self.truncation.num_tokens
        if num_tokens is not None and num_tokens > self.max_tokens:
            message = f"it must not be above {self.max_tokens}, the most tokens of an input"
            raise InvalidRequest("truncate_prompt_tokens", message)
        return num_tokens or self.max_tokens

    def _short_enough(self, text: str, limit: int) -> str:
        """Return as much of a text as has surely more tokens than are kept."""
        longest = longest_token(self.model) if len(text) > limit else None
        if longest is None:
            return text
        assert self.truncation is not None, "something is truncated"
        return text[self.truncation.kept((limit + NUM_CONTEXT_TOKENS) * longest)]


def _cut(tokens: Sequence[int], limit: int, truncation: Truncation) -> list[int]:
    return list(tokens[truncation.kept(limit)]) if limit else []


def _around(whole: Sequence[int], plain: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the special tokens before and after a text's own; none if these cannot be told apart."""
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return (), ()
