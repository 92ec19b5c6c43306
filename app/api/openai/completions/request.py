"""`/v1/completions`: the request, the answer, and the chunks of a streamed answer."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, PlainValidator, model_validator

from app.api.openai.chat.response import PromptProgress
from app.api.openai.schemas import unsupported
from app.api.openai.schemas.logprobs import CompletionLogprobs
from app.api.openai.schemas.sampling import MAX_CHOICES, GenerationRequest
from app.api.openai.schemas.usage import Timings, Usage
from app.api.schemas.fields import FinishReasonText, TokenId, check_encodable, check_length, fault

_MAX_PROMPTS: Final = 1024  # as vLLM
_MAX_TOKEN_IDS: Final = 1 << 20  # of all prompts together
_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's

# Beams are not drawn but searched for, and told when the search is over.
_NOT_OF_BEAMS: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "echo",
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stream",
        "structured_outputs",
        "top_k",
        "top_p",
    }
)


def _prompts(value: Any) -> list[str | list[int]]:
    """Return a list of prompts, each in text or in tokens, also of a single one."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        prompts = [value]
    else:
        prompts = value
    check_length(prompts, _MAX_PROMPTS)
    if sum(len(prompt) for prompt in prompts if isinstance(prompt, list)) > _MAX_TOKEN_IDS:
        message = f"it has more than {_MAX_TOKEN_IDS} tokens"
        raise fault(message)
    return [_prompt(prompt) for prompt in prompts]


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return check_encodable(value)
    # A boolean is no integer here.
    if not isinstance(value, list) or not {*map(type, value)} <= {int}:
        raise fault("it must be a text or a list of token ids")
    return value


_Tokens = Annotated[list[TokenId], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
_TokenLists = Annotated[list[_Tokens], Field(min_length=1, max_length=_MAX_PROMPTS)]

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | _Tokens | _Texts | _TokenLists),
]


class CompletionRequest(GenerationRequest):
    defaults = unsupported.COMPLETIONS

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, description="16 if left out.")
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="`n` if left out.")
    add_special_tokens: bool = True
    use_beam_search: bool = Field(
        default=False, description="The likeliest `n` answers, out of `best_of` beams."
    )
    length_penalty: float = Field(default=1.0, ge=-10, le=10, description="Of beams.")

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if self.use_beam_search:
            for name in sorted(self.model_fields_set & _NOT_OF_BEAMS):
                if getattr(self, name) != type(self).model_fields[name].get_default(
                    call_default_factory=True
                ):
                    raise fault("this cannot be combined with use_beam_search", name)
            if self.temperature not in (0, 1):
                raise fault("beams are not drawn; leave it out", "temperature")
        elif self.length_penalty != 1:
            raise fault("this needs use_beam_search: true", "length_penalty")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise fault("it must be at least n", "best_of")
        if self.num_choices > self.n and self.stream:
            raise fault("the best answers cannot be streamed before they are known", "best_of")
        if len(self.prompt) * self.num_choices > _MAX_PROMPTS:
            raise fault(f"{_MAX_PROMPTS} are the most answers to all prompts together", "n")
        return self

    @property
    def num_choices(self) -> int:
        return self.best_of or self.n

    @property
    def num_reserved_tokens(self) -> int:
        """The default gives way to the context, since nobody asked for it."""
        return self.max_tokens or max(_DEFAULT_MAX_TOKENS, self.min_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """Answers are compared by the odds of their tokens, so these are needed then, too."""
        return 0 if self.logprobs is None and self.num_choices > self.n else self.logprobs


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonText | None


class Completion(BaseModel):
    """Or a chunk of one: only what is set is sent."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    system_fingerprint: str
    prompt_progress: PromptProgress | None = None
