"""The parameters that chat and completions have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from uuid import uuid4

from pydantic import AliasChoices, Field, model_validator

from app.api.openai.schemas.local_sampling import LocalSampling
from app.api.openai.schemas.prompt_cache import PromptCacheFields
from app.api.openai.schemas.queue_options import QueueOptions
from app.api.openai.schemas.response_options import ResponseOptions
from app.api.openai.schemas.structured_outputs import MAX_GRAMMAR_LENGTH, StructuredOutputs
from app.api.schemas.fields import (
    INT32_MAX,
    MAX_TOKEN_IDS,
    CacheSalt,
    JsonSchema,
    LogitBias,
    Seed,
    StopStringList,
    Text,
    TokenId,
    check_agreement,
    field_error,
)
from app.generation.params import GenerationParams
from app.parsing.output_format import GrammarSpec
from app.prompts.render import Truncation
from batching import NOT_STORED, InvalidRequest, gbnf_grammar, json_schema_grammar

# An upper bound of the setting MLX_SERVER_MAX_CHOICES.
MAX_CHOICES: Final = 128

_MAX_STOP_TOKENS: Final = 1024
_MAX_BAD_WORDS: Final = 128

# llama.cpp, SGLang and Ollama have other names for some fields; the first of each is ours.
MAX_TOKENS_NAMES: Final = ("max_tokens", "max_output_tokens", "n_predict", "num_predict")
_NAMES: Final = (MAX_TOKENS_NAMES, ("min_tokens", "min_new_tokens"))

BadWord = Annotated[Text, Field(min_length=1, max_length=256)]


class GenerationRequest(LocalSampling, ResponseOptions, QueueOptions, PromptCacheFields):
    """Ranges are vLLM's, and OpenAI's where it has the field.

    unlimited: the names of `max_tokens` that may be -1, which is no limit.
    """

    unlimited: ClassVar[Sequence[str]] = ("n_predict", "num_predict")

    model: Text | None = Field(default=None, description="The default model if left out.")
    max_tokens: int | None = Field(
        default=None, ge=1, le=INT32_MAX, validation_alias=AliasChoices(*MAX_TOKENS_NAMES)
    )
    logit_bias: LogitBias = Field(default_factory=dict)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    min_tokens: int = Field(
        default=0, ge=0, le=INT32_MAX, validation_alias=AliasChoices("min_tokens", "min_new_tokens")
    )
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_STOP_TOKENS)] = Field(
        default_factory=list
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: Annotated[list[BadWord], Field(max_length=_MAX_BAD_WORDS)] = Field(
        default_factory=list
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)] | None
    ) = None
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=INT32_MAX,
        description="Keep the last tokens only; -1 keeps as many as fit.",
    )
    truncation_side: Literal["left", "right"] = Field(
        default="left", description="`right` keeps the first tokens instead; vLLM's."
    )
    cache_prompt: bool = Field(
        default=True, description="`false` uses no cached prefix, and leaves none; llama.cpp's."
    )
    cache_salt: CacheSalt | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: Text | None = Field(
        default=None, max_length=MAX_GRAMMAR_LENGTH, description="In GBNF; llama.cpp's."
    )
    json_schema: JsonSchema | None = Field(default=None, description="Of the content; llama.cpp's.")
    seed: Seed | None = None
    stop: StopStringList = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        return _without_contradictions(data, cls.unlimited) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        limit = self.max_output_tokens
        if limit is not None and self.min_tokens > limit:
            raise field_error("it must not be above max_tokens", "min_tokens")
        if self.truncate_prompt_tokens == 0:
            raise field_error("it must not be 0", "truncate_prompt_tokens")
        self.sampling()
        formats = self.content_formats
        if self.allowed_token_ids is not None and formats:
            raise field_error(f"it cannot be combined with {formats[0]}", "allowed_token_ids")
        if len(formats) > 1:
            raise field_error(f"it cannot be combined with {formats[1]}", formats[0])
        return self

    @property
    def max_output_tokens(self) -> int | None:
        """The most tokens of a choice; None is as many as fit the context."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """How many completions of each prompt are made."""
        return self.n

    @property
    @abstractmethod
    def num_reserved_tokens(self) -> int:
        """The tokens of output that a truncated prompt leaves room for."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Log probabilities of so many tokens beside each sampled one; None is without."""

    def truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        num_tokens = self.truncate_prompt_tokens if self.truncate_prompt_tokens > 0 else None
        return Truncation(num_tokens, self.num_reserved_tokens, self.truncation_side)

    @property
    def content_formats(self) -> list[str]:
        """The fields that ask for a format of the content."""
        names = ("structured_outputs", "grammar", "json_schema")
        return [name for name in names if getattr(self, name) not in (None, "")]

    def content_grammar(self) -> GrammarSpec | None:
        """Return the grammar that the request asks of the content; blocking.

        Raises:
            InvalidRequest: it is malformed.
        """
        if self.structured_outputs is not None:
            return GrammarSpec(self.structured_outputs.grammar(), "structured_outputs")
        if self.grammar:
            return GrammarSpec(gbnf_grammar(self.grammar), "grammar")
        if self.json_schema is not None:
            return GrammarSpec(json_schema_grammar(self.json_schema), "json_schema")
        return None

    def to_generation_params(self) -> GenerationParams:
        return GenerationParams(
            **self.sampling(),
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            min_tokens=self.min_tokens,
            num_choices=self.num_choices,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            logprobs=self.num_logprobs,
            # One for each of the ids.
            has_hidden_logprobs=self.return_token_ids,
            has_cut_logprobs=self.return_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids,
            cache_salt=self.cache_salt if self.cache_prompt else uuid4().hex,
            retention=self.retention() if self.cache_prompt else NOT_STORED,
            report_progress=self.return_progress,
        )


def _without_contradictions(data: dict[str, Any], unlimited: Sequence[str]) -> dict[str, Any]:
    """Return the fields without those that are null or unlimited.

    Raises:
        PydanticCustomError: a field has two values, under two of its names.
    """
    present = {
        name: value
        for name, value in data.items()
        if value is not None and not (name in unlimited and value == -1)
    }
    for names in _NAMES:
        check_agreement({name: present.get(name) for name in names})
    return present


def check_num_choices(body: GenerationRequest, limit: int) -> None:
    """Raise InvalidRequest if a request asks for more choices than the server allows."""
    if body.num_choices > limit:
        param = "n" if body.n > limit else "best_of"
        raise InvalidRequest(param, f"at most {limit} choices of a prompt are allowed")
