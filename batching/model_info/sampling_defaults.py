"""The sampling parameters that a model comes with."""

from dataclasses import asdict, dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The sampling parameters that a model's authors recommend; None where they recommend nothing.

    They apply where a request does not set the parameter, and have the ranges of a request.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def or_else(self, others: "SamplingDefaults") -> "SamplingDefaults":
        """Return these, and the others where these recommend nothing."""
        own = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(others, **own)


NO_DEFAULTS: Final = SamplingDefaults()
