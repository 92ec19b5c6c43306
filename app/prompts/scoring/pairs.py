"""The pairs of texts that a cross-encoder reads.  Blocking."""

from collections.abc import Sequence

from app.prompts.render import PromptTooLong, completion_prompt
from batching import CrossEncoder, InputTooLong, ModelInfo, check_input


class PairPrompts:
    """Writes the pairs of one request; a text that stands first in many is tokenized once."""

    def __init__(
        self,
        model: ModelInfo,
        encoder: CrossEncoder,
        params: tuple[str, str],
        *,
        max_prompt_tokens: int | None = None,
        max_document_tokens: int | None = None,
    ) -> None:
        """params: the fields of both texts, for errors.

        max_prompt_tokens, max_document_tokens: beyond these the second text loses its end; None is no limit.
        """
        self._model, self._encoder, self._params = model, encoder, params
        self._max_prompt_tokens = max_prompt_tokens
        self._max_document_tokens = max_document_tokens
        self._begun: dict[str, Sequence[int]] = {}

    def write(self, index: int, query: str, document: str) -> list[int]:
        """Return the tokens of a pair; `index` is the document's, for errors.

        Raises:
            InvalidRequest, InputTooLong: the pair does not fit the model.
        """
        param = f"{self._params[1]}.{index}"
        begun, after = self._beginning(query), self._encoder.after
        second = self._encoded(param, document)[: self._max_document_tokens]
        if self._max_prompt_tokens is not None:
            second = second[: max(0, self._max_prompt_tokens - len(begun) - len(after))]
        pair = [*begun, *second, *after]
        check_input(self._model, param, pair, self._model.max_model_len)
        return pair

    def second(self, query: str) -> int:
        """Return where the second text of a pair with this first one begins."""
        return len(self._beginning(query))

    def _beginning(self, query: str) -> Sequence[int]:
        if query not in self._begun:
            first = self._encoded(self._params[0], query)
            self._begun[query] = [*self._encoder.before, *first, *self._encoder.between]
        return self._begun[query]

    def _encoded(self, param: str, text: str) -> list[int]:
        try:
            return completion_prompt(self._model, text, add_special_tokens=False)
        except PromptTooLong as error:
            limit = self._model.max_model_len
            raise InputTooLong(error.num_prompt_tokens, limit, param) from None
