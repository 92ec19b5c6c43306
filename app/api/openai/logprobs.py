"""Log probabilities, in the formats of chat, completions and vLLM."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.api.openai.schemas.logprobs import (
    ChoiceLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptPosition,
    TokenLogprob,
    TopLogprob,
)
from app.generation.choice import TokenWithLogprob
from batching import TokenLogprobs

TokenBytes = Callable[[int], bytes]

# JSON has no infinity; OpenAI's number for an impossible token.
_FLOOR: Final = -9999.0


def chat_logprobs(
    token_bytes: TokenBytes, tokens: Sequence[TokenWithLogprob], *, as_ids: bool = False
) -> ChoiceLogprobs:
    """`as_ids` names tokens by their ids."""
    return ChoiceLogprobs(content=ChatLogprobs(token_bytes, tokens, as_ids), refusal=None)


@dataclass(frozen=True, slots=True)
class ChatLogprobs:
    """Log probabilities in the format of chat, made again in each iteration."""

    token_bytes: TokenBytes
    tokens: Sequence[TokenWithLogprob]
    as_ids: bool = False

    def __iter__(self) -> Iterator[TokenLogprob]:
        for token in self.tokens:
            yield TokenLogprob(
                **self._named(token.token_id, token.logprobs.logprob),
                top_logprobs=[TopLogprob(**self._named(*top)) for top in token.logprobs.top],
            )

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.token_bytes(token_id)
        name = _id_name(token_id) if self.as_ids else token_name(token)
        return {"token": name, "bytes": list(token), "logprob": _finite(logprob)}


@dataclass(frozen=True, slots=True)
class CompletionLogprobsWriter:
    """Log probabilities in the format of completions; `as_ids` names tokens by their ids."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def of_output(self, tokens: Sequence[TokenWithLogprob], offset: int = 0) -> CompletionLogprobs:
        """`offset` is where the output begins in the text of the response, in characters."""
        return CompletionLogprobs(
            text_offset=[offset + token.offset for token in tokens],
            token_logprobs=[_finite(token.logprobs.logprob) for token in tokens],
            tokens=[self._name(token.token_id) for token in tokens],
            top_logprobs=[self._by_name(token.token_id, token.logprobs) for token in tokens],
        )

    def of_prompt(
        self,
        token_ids: Sequence[int],
        offsets: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        num_top: int,
    ) -> CompletionLogprobs:
        """The first token has no log probability, so `logprobs` begins with the second."""
        kept = [each._replace(top=each.top[:num_top]) for each in logprobs]
        pairs = zip(token_ids[1:], kept, strict=True)
        return CompletionLogprobs(
            text_offset=list(offsets),
            token_logprobs=[None, *(_finite(each.logprob) for each in kept)],
            tokens=list(map(self._name, token_ids)),
            top_logprobs=[None, *(self._by_name(*pair) for pair in pairs)],
        )

    def _name(self, token_id: int) -> str:
        return _id_name(token_id) if self.as_ids else token_name(self.token_bytes(token_id))

    def _by_name(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the token there and the most probable ones.

        Of two with one name, the token there or else the more probable one.
        """
        by_name: dict[str, float] = {}
        for each, logprob in ((token_id, logprobs.logprob), *logprobs.top):
            by_name.setdefault(self._name(each), _finite(logprob))
        return by_name


def prompt_logprobs(
    token_bytes: TokenBytes,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
) -> Iterator[PromptPosition]:
    """Yield vLLM's form: for each token of a prompt but the first, by id.

    The token itself comes with the `num_top` most probable ones; its rank is known only among them.
    """

    def named(token_id: int, logprob: float, rank: int | None) -> tuple[str, PromptLogprob]:
        text = token_name(token_bytes(token_id))
        return str(token_id), PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=text)

    yield None
    for token_id, each in zip(token_ids[1:], logprobs, strict=True):
        ranked = [named(*pair, rank) for rank, pair in enumerate(each.top[:num_top], 1)]
        yield dict([named(token_id, each.logprob, None), *ranked])


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        **{
            name: getattr(first, name) + getattr(second, name)
            for name in CompletionLogprobs.model_fields
        }
    )


def token_name(token: bytes) -> str:
    """Return a token's text; part of a character is written as its bytes, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
