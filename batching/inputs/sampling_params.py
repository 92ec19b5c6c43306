"""How the tokens of a request are sampled."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class DryParams:
    """The penalty of tokens that would go on with a repetition (DRY, as llama.cpp has it).

    Where the last n tokens occurred before, the token that followed them there loses
    `multiplier * base ** (n - allowed_length)` of its logit, for the largest such n, from `allowed_length` on.

    last_n: how many of the last tokens of the prompt and the output are looked at; None is all.
    breakers: tokens that end a sequence: no repetition reaches over one, and they have no penalty.
    breaker_sequences: tokens that do so together.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int | None = None
    breakers: frozenset[int] = frozenset()
    breaker_sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token of a request is sampled from the logits.

    temperature: divides the logits; 0 is greedy decoding.
    top_p, min_p: probabilities in [0, 1]; 1 and 0 turn them off.
    top_k: how many of the most probable tokens are kept; 0 turns it off.
    top_n_sigma: keep logits within this many standard deviations of the highest one (Tang et al. 2024);
        0 turns it off.
    typical_p: keep the tokens whose information is nearest to the entropy, up to this probability
        (Meister et al. 2022); 1 turns it off.
    xtc_probability: how often all but the last of the tokens of at least `xtc_threshold` are left out (XTC,
        as llama.cpp); 0 turns it off.
    temperature_last: the other parameters choose from the probabilities before the temperature, as in llama.cpp.
    dynatemp_range: the temperature is so much lower where one token is certain, and higher where all are
        equally probable; between them by the entropy's part of its maximum to the power of
        `dynatemp_exponent` (as llama.cpp).  0 turns it off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that were generated before,
        once or once per occurrence (OpenAI).
    dry: a penalty of repetitions; None is without.
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
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    temperature_last: bool = False
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry: DryParams | None = None
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

    @property
    def is_plain(self) -> bool:
        """True if the temperature, top-k, top-p, min-p and top-n-sigma, in this order, are all that chooses."""
        return not (
            self.typical_p < 1
            or self.xtc_probability > 0
            or self.temperature_last
            or self.dynatemp_range > 0
        )


GREEDY: Final = SamplingParams(temperature=0.0)
