"""Parameters that choose a token: OpenAI's, vLLM's and llama.cpp's."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import INT32_MAX, Text, check_agreement, field_error
from app.generation.params import DryPenalty

_MAX_BREAKERS: Final = 128
_MAX_BREAKER_LENGTH: Final = 64
_MAX_SAMPLERS: Final = 32
_MAX_SAMPLERS_LENGTH: Final = 256

# What each of llama.cpp's samplers is without, by our fields.
_OFF: Final[dict[str, dict[str, Any]]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry": None},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
_FIRST: Final = ("penalties", "dry", "top_n_sigma")
_CHOOSING: Final = ("top_k", "typ_p", "top_p", "min_p", "xtc")
# With the temperature first, as vLLM, and last, as llama.cpp.
_ORDER: Final = (*_FIRST, "temperature", *_CHOOSING)
_ORDER_OF_LAST: Final = (*_FIRST, *_CHOOSING, "temperature")
_OTHER_NAMES: Final = {
    "temp": "temperature",
    "typical": "typ_p",
    "typical_p": "typ_p",
    "typ": "typ_p",
    "nucleus": "top_p",
}
_LETTERS: Final = dict(zip("edskypmxta", (*_ORDER_OF_LAST, "adaptive_p"), strict=True))
# The fields that `GenerationParams` has as they are.
_SAME_NAME: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "temperature_last",
    "dynatemp_range",
    "dynatemp_exponent",
)
_NAMES: Final = (("repetition_penalty", "repeat_penalty"), ("typical_p", "typ_p"))
# They do nothing without fields that are refused.
_WITHOUT_EFFECT: Final = frozenset({"tfs_z", "adaptive_p"})


def _read_breakers(value: Any) -> Any:
    """Read a list that is written as JSON, as text-generation-webui takes it."""
    if not isinstance(value, str):
        return value
    if len(value) > _MAX_BREAKERS * _MAX_BREAKER_LENGTH:
        raise field_error(f"at most {_MAX_BREAKERS} texts of {_MAX_BREAKER_LENGTH} characters")
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise field_error("it must be a list of texts") from None


def _read_samplers(value: Any) -> Any:
    """Read names that are separated by semicolons, or letters."""
    if not isinstance(value, str) or len(value) > _MAX_SAMPLERS_LENGTH:
        return value
    if set(value) <= _LETTERS.keys():
        return [_LETTERS[letter] for letter in value]
    return [name for name in value.split(";") if name]


_Breaker = Annotated[Text, Field(min_length=1, max_length=_MAX_BREAKER_LENGTH)]
_Sampler = Annotated[Text, Field(max_length=64)]


class LocalSampling(RequestModel):
    """Ranges are vLLM's, and OpenAI's where it has the field; names and defaults of the others are llama.cpp's."""

    # Without a value these five have the default of the model's generation_config.json.
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX, description="0 and -1 are off.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    # Beyond these, logits overflow.
    repetition_penalty: float | None = Field(
        default=None,
        ge=0.01,
        le=100,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
    )
    top_n_sigma: float = Field(
        default=0.0, ge=-1, le=1000, description="0 and -1 are off; llama.cpp's."
    )
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)

    typical_p: float = Field(
        default=1.0, ge=0, le=1, validation_alias=AliasChoices("typical_p", "typ_p")
    )
    xtc_probability: float = Field(default=0.0, ge=0, le=1)
    xtc_threshold: float = Field(default=0.1, ge=0, le=1, description="Above 0.5 XTC is off.")
    temperature_last: bool = False
    dynatemp_range: float = Field(default=0.0, ge=0, le=10)
    dynatemp_exponent: float = Field(default=1.0, ge=0, le=100)
    dry_multiplier: float = Field(default=0.0, ge=0, le=100)
    dry_base: float = Field(default=1.75, ge=1, le=100)
    dry_allowed_length: int = Field(default=2, ge=0, le=64)
    dry_penalty_last_n: int = Field(
        default=-1, ge=-1, le=INT32_MAX, description="-1 is the whole context, 0 is off."
    )
    dry_sequence_breakers: Annotated[
        list[_Breaker], Field(max_length=_MAX_BREAKERS), BeforeValidator(_read_breakers)
    ] = Field(default=["\n", ":", '"', "*"])
    repeat_last_n: int = Field(default=-1, ge=-1, le=INT32_MAX)
    samplers: (
        Annotated[list[_Sampler], Field(max_length=_MAX_SAMPLERS), BeforeValidator(_read_samplers)]
        | None
    ) = Field(default=None, description="Those that are used; the temperature is first or last.")

    @model_validator(mode="before")
    @classmethod
    def _check_names_of_samplers(cls, data: Any) -> Any:
        for names in _NAMES if isinstance(data, dict) else ():
            check_agreement({name: data.get(name) for name in names})
        return data

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `GenerationParams` that choose a token.

        Raises:
            PydanticCustomError: a sampler is unknown or cannot have its place, or only the last tokens are penalised.
        """
        fields = {name: getattr(self, name) for name in _SAME_NAME} | {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "top_n_sigma": max(0.0, self.top_n_sigma),
            "dry": self._dry(),
        }
        if self.repeat_last_n == 0:
            fields = fields | _OFF["penalties"]
        if self.samplers is not None:
            fields = _with_samplers(fields, self.samplers)
        penalties = fields | {"repetition_penalty": fields["repetition_penalty"] or 1.0}
        if self.repeat_last_n > 0 and not _is_off("penalties", penalties):
            message = "with a penalty it must be -1: tokens are counted in the whole context"
            raise field_error(message, "repeat_last_n")
        return fields

    def _dry(self) -> DryPenalty | None:
        if self.dry_multiplier == 0 or self.dry_penalty_last_n == 0:
            return None
        return DryPenalty(
            multiplier=self.dry_multiplier,
            base=self.dry_base,
            allowed_length=self.dry_allowed_length,
            last_n=self.dry_penalty_last_n if self.dry_penalty_last_n > 0 else None,
            breakers=self.dry_sequence_breakers,
        )


def _with_samplers(fields: dict[str, Any], samplers: Sequence[str]) -> dict[str, Any]:
    listed = [_named(name) for name in samplers if name not in _WITHOUT_EFFECT]
    unused = {key: value for name in _OFF.keys() - set(listed) for key, value in _OFF[name].items()}
    fields = fields | unused
    used = [name for name in dict.fromkeys(listed) if not _is_off(name, fields)]
    if used == [name for name in _ORDER if name in used]:
        return fields | {"temperature_last": False}
    if used != [name for name in _ORDER_OF_LAST if name in used]:
        message = f"the order must be {', '.join(_ORDER)}, or the same with temperature last"
        raise field_error(message, "samplers")
    return fields | {"temperature_last": True}


def _named(name: str) -> str:
    name = name.replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    if name not in _OFF:
        raise field_error(f"the samplers are {', '.join(_ORDER)}", "samplers")
    return name


def _is_off(name: str, fields: dict[str, Any]) -> bool:
    return all(fields[key] == value for key, value in _OFF[name].items())
