"""What a request asks of the prefix cache."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import Text
from batching import RetainedPrefix, Retention

_MINUTE: Final = 60.0
_HOUR: Final = 60 * _MINUTE
_TTLS: Final = {"5m": 5 * _MINUTE, "30m": 30 * _MINUTE, "1h": _HOUR, "12h": 12 * _HOUR}
# OpenAI's figure for a prefix in memory, after its last use.
_SECONDS_OF_KEY: Final = 10 * _MINUTE
_EXTENDED: Final = 24 * _HOUR


class PromptCacheOptions(RequestModel):
    """With `mode: explicit` nothing is retained, as breakpoints within a prompt have no effect."""

    defaults: ClassVar[Defaults] = {"prewarm": (False,)}

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["5m", "30m", "1h", "12h"] = "30m"


class ResponseCacheOptions(PromptCacheOptions):
    defaults: ClassVar[Defaults] = {}

    prewarm: bool = Field(default=False, description="As `generate: false`.")


class PromptCacheFields(RequestModel):
    prompt_cache_key: Annotated[Text, Field(max_length=1024)] | None = Field(
        default=None,
        description="A session: its last prompt is retained for ten minutes where others need room.",
    )
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None, description="`in_memory` is not written to disk."
    )

    def retention(self) -> Retention:
        """Return what becomes of the prompt's blocks, and of those of its output."""
        seconds = self._seconds()
        return Retention(
            self.prompt_cache_key or "",
            (RetainedPrefix(None, seconds),) if seconds else (),
            may_store=self.prompt_cache_retention in (None, "24h"),
        )

    def _seconds(self) -> float:
        """Return how long they are retained, the longest that a field asks for; 0 is not at all."""
        options = self.prompt_cache_options
        if options is not None and options.mode == "explicit":
            return 0.0
        asked = 0.0 if options is None else _TTLS[options.ttl]
        if self.prompt_cache_key is not None:
            asked = max(asked, _SECONDS_OF_KEY)
        return max(asked, _EXTENDED) if self.prompt_cache_retention == "24h" else asked
