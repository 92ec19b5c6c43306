"""`/v1/completions`: the request."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Final, Self

from pydantic import AliasChoices, Field, PlainValidator, model_validator

from app.api.openai.schemas import unsupported
from app.api.openai.schemas.prompts import Prompts, prompts_type, read_prompts
from app.api.openai.schemas.sampling import MAX_CHOICES, MAX_TOKENS_NAMES, GenerationRequest
from app.api.schemas.fields import INT32_MAX, Text, field_error
from app.generation.params import BeamParams, GenerationParams

_MAX_PROMPTS: Final = 1024  # as vLLM
_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's

# Beams are not sampled, and returned only when the search is over.
_NOT_OF_BEAMS: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "dry_multiplier",
        "dynatemp_range",
        "echo",
        "frequency_penalty",
        "grammar",
        "json_schema",
        "logit_bias",
        "logprob_token_ids",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "samplers",
        "seed",
        "stream",
        "structured_outputs",
        "top_k",
        "top_n_sigma",
        "top_p",
        "typical_p",
        "xtc_probability",
    }
)


# The values of these fields where sampling does not follow the model's defaults.
_NO_EFFECT: Final = {"min_p": 0, "repetition_penalty": 1, "top_k": 0, "top_n_sigma": -1, "top_p": 1}


_Prompts = Annotated[
    Prompts,
    PlainValidator(
        partial(read_prompts, max_prompts=_MAX_PROMPTS),
        json_schema_input_type=prompts_type(_MAX_PROMPTS),
    ),
]


class CompletionRequest(GenerationRequest):
    defaults = unsupported.COMPLETIONS

    prompt: _Prompts
    suffix: Text = Field(
        default="", description="The model fills in what stands between `prompt` and this."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT32_MAX,
        validation_alias=AliasChoices(*MAX_TOKENS_NAMES),
        description="16 if left out; 0 with `echo` only.",
    )
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="`n` if left out.")
    add_special_tokens: bool = True
    use_beam_search: bool = Field(
        default=False, description="The most probable `n` outputs of `best_of` beams."
    )
    length_penalty: float = Field(default=1.0, ge=-10, le=10, description="Of beams.")

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if self.use_beam_search:
            for name in sorted(self.model_fields_set & _NOT_OF_BEAMS):
                default = type(self).model_fields[name].get_default(call_default_factory=True)
                if getattr(self, name) not in (default, _NO_EFFECT.get(name, default)):
                    raise field_error("this cannot be combined with use_beam_search", name)
            if self.temperature not in (None, 0, 1):
                raise field_error("beams are not sampled; leave it out", "temperature")
        elif self.length_penalty != 1:
            raise field_error("this needs use_beam_search: true", "length_penalty")
        return self

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise field_error("without echo: true it must be at least 1", "max_tokens")
        if self.logprob_token_ids and self.logprobs is None:
            raise field_error("this needs logprobs", "logprob_token_ids")
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise field_error(f"it cannot be combined with {name}", "suffix")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise field_error("it needs a prompt in text", "suffix")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise field_error("it must be at least n", "best_of")
        if self.num_choices > self.n and self.stream:
            raise field_error("with best_of above n the completions cannot be streamed", "best_of")
        if len(self.prompt) * self.num_choices > _MAX_PROMPTS:
            raise field_error(f"at most {_MAX_PROMPTS} completions of all prompts together", "n")
        return self

    @property
    def num_choices(self) -> int:
        return self.best_of or self.n

    @property
    def num_reserved_tokens(self) -> int:
        """The default, since the request sets no limit; it gives way to the context."""
        if self.max_tokens is None:
            return max(_DEFAULT_MAX_TOKENS, self.min_tokens)
        return max(1, self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """`best_of` ranks completions by their log probabilities, so it needs them too."""
        return 0 if self.logprobs is None and self.num_choices > self.n else self.logprobs

    @property
    def _num_prompt_logprobs(self) -> int | None:
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((number for number in asked if number is not None), default=None)

    def to_generation_params(self) -> GenerationParams:
        return replace(
            super().to_generation_params(),
            default_max_tokens=self.num_reserved_tokens,
            prompt_logprobs=self._num_prompt_logprobs,
            # Evaluations take the last one off, which they count as the token that they asked for.
            has_hidden_logprobs=self.return_token_ids or self.echo,
            beams=BeamParams(self.n, self.length_penalty) if self.use_beam_search else None,
        )
