"""The golden file: greedy tokens of an independent implementation, with their margins."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

# Two implementations may order tokens differently when the logits are this close.
MARGIN: Final = 1e-3


@dataclass(frozen=True)
class GoldenCase:
    name: str
    messages: list[dict[str, Any]]
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    margins: list[float]
    logprobs: list[float]
    text: str
    finish_reason: str

    @property
    def max_tokens(self) -> int:
        """One more than there are in a case that stops, so that it has to."""
        return len(self.completion_token_ids) + (self.finish_reason == "stop")

    def shortened(self, num_tokens: int) -> Self:
        """Return the case with no more than its first tokens, and the text of all."""
        if len(self.completion_token_ids) <= num_tokens:
            return self
        return replace(
            self,
            completion_token_ids=self.completion_token_ids[:num_tokens],
            margins=self.margins[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            finish_reason="length",
        )

    def check(self, token_ids: list[int]) -> None:
        """Fail unless the tokens are the golden ones, or part from them at a near tie."""
        expected = self.completion_token_ids
        pairs = zip(token_ids, expected, self.margins, strict=False)
        for got, token, margin in pairs:
            if got != token:
                assert margin < MARGIN, f"{self.name}: {token_ids} instead of {expected}"
                return
        assert len(token_ids) == len(expected), f"{self.name}: {token_ids} ends elsewhere"


def _load() -> tuple[GoldenCase, ...]:
    path = Path(__file__).parents[1] / "data" / "golden_smollm2.json"
    fields = GoldenCase.__dataclass_fields__
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return tuple(GoldenCase(**{name: case[name] for name in fields}) for case in cases)


GOLDEN: Final = _load()
