"""The fields of requests that read texts and write none."""

from typing import Literal, Self

from pydantic import Field, model_validator

from app.api.openai.schemas.queue_options import QueueOptions
from app.api.schemas.fields import INT32_MAX, CacheSalt, Text, field_error
from app.prompts.render import Truncation


class PooledRequest(QueueOptions):
    model: Text | None = Field(default=None, description="The default model if left out.")
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=INT32_MAX,
        description="Keep so many tokens of each input; -1 keeps as many as fit.",
    )
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise field_error("it must not be 0", "truncate_prompt_tokens")
        return self

    @property
    def num_kept_tokens(self) -> int | None:
        """How many tokens are kept, if some are cut; None is as many as fit."""
        num_tokens = self.truncate_prompt_tokens or -1
        return num_tokens if num_tokens > 0 else None

    def cut(self, side: Literal["left", "right"] = "right") -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.num_kept_tokens, 0, side)
