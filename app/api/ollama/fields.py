"""The fields that several requests of Ollama's API have."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import (
    INT32_MAX,
    MAX_SCHEMA_LENGTH,
    JsonSchema,
    Seed,
    StopStringList,
    Text,
    field_error,
)
from app.generation.params import GenerationParams
from app.parsing.output_format import GrammarSpec
from app.prompts.images.image_marks import ImageSource, joined
from batching import json_object_grammar, json_schema_grammar

_MAX_IMAGES: Final = 128
# Go's units, in seconds.
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = r"(\d{1,9}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)"
_DURATION: Final = re.compile(rf"(-?)((?:{_PART}){{1,8}}|0)")
FOREVER: Final = float("inf")


def _seconds(value: Any) -> Any:
    """Return a duration in seconds: a number of them, or Go's text of one; below 0 is for ever."""
    if isinstance(value, str):
        if (match := _DURATION.fullmatch(value)) is None:
            raise field_error("it must be a number of seconds, or a text such as '5m' or '1h30m'")
        seconds = sum(float(n) * _UNITS[unit] for n, unit in re.findall(_PART, match[2]))
        value = -seconds if match[1] else seconds
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return FOREVER if value < 0 else float(min(value, INT32_MAX))


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | None,
    BeforeValidator(_seconds, json_schema_input_type=float | str | None),
    Field(description="Seconds or a text such as `5m`, below 0 for ever; 0 unloads."),
]

_Base64 = Annotated[Text, Field(min_length=1)]
Images = Annotated[list[_Base64], Field(max_length=_MAX_IMAGES)]


def with_images(text: str, images: list[str]) -> str:
    """Return a text after marks of images."""
    if not images:
        return text
    return joined([*(ImageSource(image, "base64") for image in images), *filter(None, [text])])


def _format(value: Any) -> Any:
    return None if value == "" else value


Format = Annotated[
    JsonSchema | Literal["json"] | None,
    BeforeValidator(_format, json_schema_input_type=dict[str, Any] | Literal["json", ""] | None),
    Field(description=f"`json` or a schema of up to {MAX_SCHEMA_LENGTH} characters; enforced."),
]
Think = bool | Literal["low", "medium", "high"] | None


def format_grammar(wanted: dict[str, Any] | str | None) -> GrammarSpec | None:
    """Return the grammar of a `format`; blocking.

    Raises:
        InvalidRequest: it is malformed.
    """
    if wanted is None:
        return None
    made = json_schema_grammar(wanted) if isinstance(wanted, dict) else json_object_grammar()
    return GrammarSpec(made, "format")


# Those of a loader (num_ctx, num_batch, num_gpu, ...) have no effect and are not listed.
_OPTIONS: Final[Defaults] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    # Penalties are of the whole text here; 64 is what Ollama has without a value.
    "repeat_last_n": (-1, 64),
}
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class Options(RequestModel):
    """How tokens are sampled; ranges are those of chat completions."""

    defaults = _OPTIONS

    num_predict: int | None = Field(
        default=None, ge=-2, le=INT32_MAX, description="Below 1: as many as fit the context."
    )
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float = Field(default=1.0, ge=0, le=1)
    seed: Seed | None = Field(default=None, description="-1 is none.")
    stop: StopStringList = Field(default_factory=list)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0

    def params(self, logprobs: int | None) -> GenerationParams:
        limit = self.num_predict
        return GenerationParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop=self.stop,
            max_tokens=limit if limit is not None and limit > 0 else None,
            # As Ollama, which ends at the end of the context.
            clamp_max_tokens=True,
            logprobs=logprobs,
        )
