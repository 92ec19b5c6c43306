"""What all objects that clients send have in common."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from app.api.openai.schemas import unsupported


class RequestModel(BaseModel):
    """An object that a client sends.

    Types are not converted: `"1"` is no number.  null means the default, unknown fields mean
    nothing, and a field of `defaults` that asks for something is refused.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    defaults: ClassVar[unsupported.Defaults] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return unsupported.without_nulls(data, cls.defaults)
