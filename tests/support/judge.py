"""A model that answers typed questions."""

import math
from typing import ClassVar

from batching.steps.sequences import SequenceState
from batching.steps.token_output import TokenLogprobs
from tests.support.speaker import Speaker


class Judge(Speaker):
    """Gives half of the probability to the label of the option called right, a quarter to all others together."""

    prompts: ClassVar[list[str]] = []

    def _named(self, sequence: SequenceState, prefix: list[int]) -> TokenLogprobs:
        text = bytes(prefix).decode()
        Judge.prompts.append(text)
        ids = sequence.sampling.logprob_token_ids
        lines = [line for line in text.splitlines() if line.endswith(": right")]
        chosen = ord(lines[-1][0]) if lines else ord("Y" if "Question: yes" in text else "N")
        others = math.log(0.25 / max(1, len(ids) - 1))
        named = tuple((i, math.log(0.5) if i == chosen else others) for i in ids)
        return TokenLogprobs(-1.0, named)
