"""What the operator can set: `MLX_SERVER_*` variables, from the environment or a `.env` file."""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from batching import EngineConfig

ENV_PREFIX: Final = "MLX_SERVER_"


class SettingsError(Exception):
    """The settings cannot be used; the text has a line for each variable at fault."""


class Settings(BaseSettings):
    """The server's settings; the environment outranks `.env`, and an empty value is no value."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_file=".env",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
    )

    model: str = Field(
        default="smollm2-135m-instruct",
        description="Model to serve: the bundled one by this name, a `.gguf` file, a model directory, "
        "or a hub id.",
    )
    model_id: str | None = Field(
        default=None,
        description="Name that clients use for the model; empty takes it from `MLX_SERVER_MODEL`.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    enable_batching: bool = Field(
        default=True,
        description="Serve many requests at once; `false` serves one at a time through the same code.",
    )
    batch_max_batch_size: int = Field(
        default=8, ge=1, description="Most requests that share a step of the model."
    )
    batch_block_pool_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1024,
        description="KV cache blocks of 32 tokens, shared by all requests; `auto` takes what fits in "
        "`MLX_SERVER_MEMORY_FRACTION`.",
    )
    max_batch_tokens: int = Field(
        default=512,
        ge=1,
        description="Most tokens that one step reads; at least `MLX_SERVER_BATCH_MAX_BATCH_SIZE`.",
    )
    prefill_chunk: int = Field(
        default=256, ge=1, description="Most prompt tokens of one request that one step reads."
    )
    max_stall_ms: float = Field(
        default=250.0,
        gt=0,
        allow_inf_nan=False,
        description="Most milliseconds that reading prompts may add to a step of running streams; "
        "less where such a step is short and few prompts wait.",
    )
    max_draft_tokens: int = Field(
        default=7,
        ge=0,
        description="Most tokens that are guessed for one request in a step, from what it said "
        "before, while few requests run; answers do not depend on it. 0 is off.",
    )
    enable_prefix_cache: bool = Field(
        default=True, description="Reuse the KV cache of prompts that begin alike."
    )
    aging_rate: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Priority classes that a waiting request climbs each second.",
    )
    max_model_len: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Most tokens of one request, prompt and output together; empty takes the model's "
        "context.",
    )
    max_choices: int = Field(
        default=16, ge=1, le=128, description="Most answers to one prompt (`n`, `best_of`)."
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the device's memory for weights and KV cache together, if the number of blocks is `auto`.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type to compute in; `auto` is float32 on a CPU and the model's own on a GPU.",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Device to compute on; `auto` is the GPU if there is one."
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that open requests get to finish once the server is told to stop.",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        default="info", description="Least severe messages to log."
    )

    @field_validator("dtype", "device", "log_level", "batch_block_pool_size", mode="before")
    @classmethod
    def _ignore_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _each_request_gets_a_token(self) -> Self:
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"{env_name('max_batch_tokens')} ({self.max_batch_tokens}) must be at least "
                f"{env_name('batch_max_batch_size')} ({self.max_num_seqs}): each running request "
                "reads a token a step"
            )
        return self

    @property
    def max_num_seqs(self) -> int:
        """The most requests that run at once."""
        return self.batch_max_batch_size if self.enable_batching else 1

    @property
    def served_model_id(self) -> str:
        """The name that clients use for the model.

        A hub id and the bundled model keep their name; a file or directory gives its last part,
        so that no path of this machine is shown to clients.
        """
        if self.model_id is not None:
            return self.model_id
        if self.model.endswith(".gguf"):
            return Path(self.model).stem
        if self.model.startswith(("/", ".", "~")):
            return Path(os.path.expanduser(self.model)).resolve().name
        return self.model

    def engine_config(self) -> EngineConfig:
        """Say the engine's share of the settings in the engine's words."""
        pool_size = self.batch_block_pool_size
        return EngineConfig(
            model=self.model,
            model_id=self.served_model_id,
            max_num_seqs=self.max_num_seqs,
            num_blocks=None if pool_size == "auto" else pool_size,
            max_batched_tokens=self.max_batch_tokens,
            prefill_chunk=self.prefill_chunk,
            max_stall_ms=self.max_stall_ms,
            max_draft_tokens=self.max_draft_tokens,
            enable_prefix_cache=self.enable_prefix_cache,
            aging_rate=self.aging_rate,
            max_model_len=self.max_model_len,
            memory_fraction=self.memory_fraction,
            dtype=self.dtype,
            device=self.device,
        )


def env_name(field: str) -> str:
    """Return the variable that sets a field."""
    return f"{ENV_PREFIX}{field}".upper()


def load_settings() -> Settings:
    """Read the environment and `.env`; raise SettingsError with all that is wrong with them."""
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError("\n".join(_lines(error.errors()))) from None
    except (OSError, UnicodeError) as error:
        raise SettingsError(f".env cannot be read: {error}") from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each `MLX_SERVER_*` variable that sets nothing.

    pydantic-settings refuses such a line in `.env` but never looks for one in the environment.
    """
    known = {env_name(field) for field in Settings.model_fields}
    strangers = (name for name in sorted(environ) if name.upper().startswith(ENV_PREFIX))
    return [_unknown(name) for name in strangers if name.upper() not in known]


def _unknown(name: str) -> str:
    near = get_close_matches(name.upper(), map(env_name, Settings.model_fields), n=1)
    return f"{name} is not a setting" + "".join(f"; did you mean {known}?" for known in near)


def _lines(errors: Iterable[ErrorDetails]) -> list[str]:
    """Return one line for each field at fault: a union reports each of its members."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        by_field.setdefault(str(error["loc"][0]) if error["loc"] else "", []).append(error)
    return [_line(field, faults) for field, faults in by_field.items()]


def _line(field: str, faults: list[ErrorDetails]) -> str:
    if not field:
        # A rule over several fields names them itself.
        return "; ".join(str(fault["ctx"]["error"]) for fault in faults)
    if field not in Settings.model_fields:
        return f"{_unknown(field.upper())} (.env)"
    limits = " or ".join(_limit(fault) for fault in faults)
    return f"{env_name(field)} must be {limits}, not {faults[0]['input']!r}"


def _limit(fault: ErrorDetails) -> str:
    return fault["msg"].removeprefix("Input should be ").partition(", unable to")[0]
