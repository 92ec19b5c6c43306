"""The base of all objects that clients send."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

# Unsupported fields, each with the values that ask for nothing.
Defaults = Mapping[str, tuple[Any, ...]]


class RequestModel(BaseModel):
    """An object that a client sends.

    Types are not converted: `"1"` is no number.  null means the default, unknown fields have no
    effect, and a field of `defaults` that asks for something is refused.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    defaults: ClassVar[Defaults] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return without_nulls(data, cls.defaults)


def without_nulls(data: Any, defaults: Defaults) -> Any:
    """Return an object's fields that are not null: null means the default everywhere.

    Raises:
        PydanticCustomError: a field of `defaults` asks for something.
    """
    if not isinstance(data, dict):
        return data
    present = {name: value for name, value in data.items() if value is not None}
    for name, accepted in defaults.items():
        if name in present and present[name] not in accepted:
            raise PydanticCustomError("unsupported", "this is not supported", {"param": name})
    return present
