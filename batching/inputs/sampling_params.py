"""How the tokens of a request are sampled."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token of a request is sampled from the logits.

    temperature: divides the logits; 0 is greedy decoding.
    top_p, min_p: probabilities in [0, 1]; 1 and 0 turn them off.
    top_k: how many of the most probable tokens are kept; 0 turns it off.
    top_n_sigma: keep logits within this many standard deviations of the highest one (Tang et al. 2024);
        0 turns it off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that were generated before,
        once or once per occurrence (OpenAI).
    repetition_penalty: a factor for tokens of the prompt and the output (CTRL, Keskar et al. 2019).
    logit_bias: pairs of token id and the value that is added to its logit.
    min_tokens: how many output tokens are generated before a stop token is allowed.
    bad_words: token sequences that the output must not contain.
    logprobs, prompt_logprobs: how many of the most probable tokens are returned with their log
        probabilities at each position of the output or the prompt, beside the token itself; None
        returns no log probabilities.
    logprob_token_ids: tokens whose log probabilities are returned at each output position, instead of
        those of the most probable ones.
    seed: the same request with the same seed samples the same tokens; None draws a random seed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @property
    def output_logprobs(self) -> int | tuple[int, ...] | None:
        """The alternatives to report for each output token: how many of the most probable, or which ids.

        None reports no log probabilities.
        """
        return None if self.logprobs is None else self.logprob_token_ids or self.logprobs

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the tokens that came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


GREEDY: Final = SamplingParams(temperature=0.0)
