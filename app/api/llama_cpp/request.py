"""`/infill`: the request."""

from typing import Annotated, Any, Final, Self
from uuid import uuid4

from pydantic import AliasChoices, Field, model_validator

from app.api.openai.schemas import unsupported
from app.api.openai.schemas.local_sampling import LocalSampling
from app.api.openai.schemas.prompt_cache import PromptCacheFields
from app.api.openai.schemas.queue_options import QueueOptions
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import (
    INT32_MAX,
    CacheSalt,
    LogitBias,
    Seed,
    StopStringList,
    Text,
    check_agreement,
)
from app.generation.params import GenerationParams
from app.prompts.render import DEFAULT_RESERVED
from batching import NOT_STORED

_MAX_FILES: Final = 256
_MAX_FIELDS: Final = 64
_MAX_INDENT: Final = 1 << 16
# The first three are llama.cpp's.
_LIMIT_NAMES: Final = (
    "n_predict",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
)


class Extra(RequestModel):
    text: Text
    filename: Text = "tmp"


class InfillRequest(LocalSampling, QueueOptions, PromptCacheFields):
    """Sampling is that of completions; `t_max_prompt_ms` and `id_slot` have no effect.

    The sampler `infill`, which leaves tokens that are nearly certain, takes the most probable one here.
    """

    defaults = unsupported.INFILL

    model: Text | None = Field(default=None, description="The default model if left out.")
    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[Extra], Field(max_length=_MAX_FILES)] = Field(default_factory=list)
    prompt: Text = Field(default="", description="Follows `input_prefix`.")
    n_predict: int = Field(
        default=-1,
        ge=-1,
        le=INT32_MAX,
        validation_alias=AliasChoices(*_LIMIT_NAMES),
        description="-1 is as many as fit; 0 only reads.",
    )
    n_indent: int = Field(
        default=0,
        ge=0,
        le=_MAX_INDENT,
        description="Ends at a further line, even a blank one, that begins with fewer spaces and tabs; these stay.",
    )
    t_max_predict_ms: int = Field(
        default=0,
        ge=-1,
        le=INT32_MAX,
        description="Ends with the first line that is complete so long after the first token; 0 and -1 are off.",
    )
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Seed | None = None
    stop: StopStringList = Field(default_factory=list)
    stream: bool = False
    cache_prompt: bool = Field(
        default=True, description="`false` uses no cached prefix, and leaves none."
    )
    cache_salt: CacheSalt | None = None
    response_fields: Annotated[list[Text], Field(max_length=_MAX_FIELDS)] = Field(
        default_factory=list, description="Only these, such as `timings/prompt_n`."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names_of_limit(cls, data: Any) -> Any:
        names = _LIMIT_NAMES if isinstance(data, dict) else ()
        check_agreement({name: data.get(name) for name in names})
        return data

    @model_validator(mode="after")
    def _check_samplers(self) -> Self:
        self.sampling()
        return self

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `GenerationParams` that choose a token.

        Raises:
            PydanticCustomError: as `LocalSampling.sampling`.
        """
        if self.samplers is None or "infill" not in self.samplers:
            return super().sampling()
        others = [name for name in self.samplers if name != "infill"]
        return self.model_copy(update={"samplers": others}).sampling() | {"temperature": 0.0}

    @property
    def num_reserved(self) -> int:
        """The tokens of output that the texts leave room for."""
        return DEFAULT_RESERVED if self.n_predict < 0 else max(1, self.n_predict)

    def params(self) -> GenerationParams:
        return GenerationParams(
            **self.sampling(),
            logit_bias=self.logit_bias,
            seed=None if self.seed == -1 else self.seed,
            stop=self.stop,
            max_tokens=None if self.n_predict < 0 else self.n_predict,
            clamp_max_tokens=True,
            cache_salt=self.cache_salt if self.cache_prompt else uuid4().hex,
            retention=self.retention() if self.cache_prompt else NOT_STORED,
        )
