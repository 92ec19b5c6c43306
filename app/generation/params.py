"""The parameters of a request's completions, which each API makes of its own fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batching import NOT_RETAINED, Retention


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling, with as many beams as the job has choices.

    num_returned: how many of the best beams are returned.
    length_penalty: exponent of the length by which a beam's log probability is divided.
    """

    num_returned: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DryPenalty:
    """A penalty of repetitions, as `batching.DryParams` has it, with the texts of its breakers."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int | None
    breakers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The parameters of a request's completions; names and ranges are those of vLLM's SamplingParams.

    temperature, top_p, top_k, min_p, repetition_penalty: None is the model's default
        (`ModelInfo.sampling_defaults`), or else vLLM's.
    max_tokens: the most tokens of each choice; 0 only processes the prompt.  None is `default_max_tokens`, or fewer if
        the context has no room for that many; if that is None as well, as many as fit in the context.
    clamp_max_tokens: reduce `max_tokens` to what the context and the server allow instead of rejecting
        the request.
    num_choices: completions of each prompt.
    stop: stop strings.
    logprobs: how many of the most probable tokens are returned at each output position, beside the
        sampled one; None returns no log probabilities.
    has_hidden_logprobs: also return those of tokens without text, such as the end-of-sequence token.
    has_cut_logprobs: also return those of tokens whose text a stop string cuts off.
    prompt_logprobs: as `logprobs`, for the tokens of the prompt.
    logprob_token_ids: return the log probabilities of these tokens instead of the most probable ones.
    cache_salt: the prefix cache is shared only by requests with the same salt.
    retention: how long the cached blocks of the prompts stay where others need room.
    report_progress: also report how much of the prompt is prefilled.
    beams: beam search; None samples.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    temperature_last: bool = False
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry: DryPenalty | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    clamp_max_tokens: bool = False
    min_tokens: int = 0
    num_choices: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    has_hidden_logprobs: bool = False
    has_cut_logprobs: bool = False
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    cache_salt: str | None = None
    retention: Retention = NOT_RETAINED
    report_progress: bool = False
    beams: BeamParams | None = None
