"""The settings of the server: their sources, values and rules."""

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.settings.engine_settings import EngineSettings
from app.settings.names import ENV_PREFIX, env_name, rename_former

# It becomes part of a header: a host has no blank, `;`, `,` or `*`.
_ORIGIN: Final = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

# An address of ZeroMQ's; the host may be an interface, and `*` is all addresses, or any free port.
_MAX_PORT: Final = 65_535
_ENDPOINT: Final = re.compile(
    r"tcp://(?:\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?:([0-9]{1,5})|\*)|ipc://.+"
)


class Settings(EngineSettings):
    """All settings of the server, validated.

    The environment overrides `.env`; flags override both (see `load_settings`).  An empty value counts as
    not set, and an unknown name in `.env` is an error.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_file=".env", env_ignore_empty=True, extra="forbid", frozen=True
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    max_queued_requests: int = Field(
        default=128,
        ge=0,
        description="Most requests that wait beside the running ones; at most half of them of low and nine tenths of normal priority. Others get a 503 with `Retry-After`.",
    )
    max_queued_tokens: int = Field(
        default=131_072,
        ge=1,
        description="Most prompt tokens that wait for prefill, of all requests; one prompt always fits.",
    )
    clamp_max_tokens: bool = Field(
        default=False,
        description="Reduce a `max_tokens` that does not fit the context, or is more than a request may "
        "ask for, to what is left; otherwise such a request gets a 400.",
    )
    max_output_tokens: int = Field(
        default=262_144,
        ge=1,
        description="Most tokens that one request may ask for, all its choices together.",
    )
    max_body_bytes: int = Field(
        default=33_554_432,
        ge=1024,
        description="Largest request body, images as base64 included; larger ones get a 413. All bodies together "
        "hold 16 times as much.",
    )
    max_connections: int = Field(
        default=1024,
        ge=1,
        description="Most open connections, at most a quarter of the limit of open files (`ulimit -n`). "
        "The one that is idle for longest makes room for a new one; if there is none, the new one gets a 503.",
    )
    max_requests_per_key: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Most requests in flight of one API key (without keys, of all clients together); others get a 429. Empty is no limit of its own.",
    )
    requests_per_minute: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Most new requests of one API key in a minute (without keys, of all clients together); others get a 429. Empty is no limit.",
    )
    api_keys: SecretStr = Field(
        default=SecretStr(""),
        description="Keys that clients send as `Authorization: Bearer <key>`, separated by commas; empty, together with the file, requires none.",
    )
    api_keys_file: Path | None = Field(
        default=None, description="File with further keys, one on each line; `#` begins a comment."
    )
    admin_keys: SecretStr = Field(
        default=SecretStr(""),
        description="Further keys, separated by commas, that also allow watching the engine "
        "(`GET /server/events`). Without any key everyone may; with keys that are all clients', no one may.",
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="Let requests of different API keys share cached prompts; response times then reveal to one client what another has sent.",
    )
    cors_origins: str = Field(
        default="",
        description="Web pages that may call the server from a browser: origins like "
        "`https://chat.example.org`, separated by commas, or `*`. Without keys, what other pages send gets "
        "a 403, but for links.",
    )
    allowed_hosts: str = Field(
        default="",
        description="Host names by which clients may address the server, besides `localhost` and its addresses: "
        "names or `*.example.org`, separated by commas; `*` is any. On a network also addresses and names that only "
        "a private network has. Others get a 403 (DNS rebinding), unless this is empty and there are keys.",
    )
    web: bool = Field(
        default=True, description="Serve a page with a chat and a view of the engine at `/`."
    )
    mcp_origins: str = Field(
        default="",
        description="Servers of tools (MCP) that the page's scripts may call: origins like `http://localhost:3001`, "
        "separated by commas.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with a model."
    )
    read_timeout: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds within which the head of a request, and then its body, must arrive; a body has one more "
        "for every 16 KiB of it.",
    )
    write_timeout: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a client that reads nothing of its response is disconnected.",
    )
    late_head_ms: int = Field(
        default=10_000,
        ge=0,
        le=10_000,
        description="Most milliseconds for which the status line of a stream waits for the first token: until then a "
        "router can send the request to another server, and an error has its own status. No longer than keep-alives "
        "are apart; 0 sends it at once.",
    )
    step_timeout: float = Field(
        default=120.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a step of the model counts as stalled: requests in flight get an error, and `/health` returns 503.",
    )
    exit_on_engine_failure: bool = Field(
        default=False,
        description="Exit with status 1 when the engine has failed, so that a supervisor restarts it; otherwise `/health` returns 503.",
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that requests in flight get to finish after a signal.",
    )
    data_dir: Path | None = Field(
        default=None,
        description="Folder for what outlives the server: stored responses, files, batches, and the key that "
        "signs values which clients keep for it. Empty is the platform's folder for data of programs.",
    )
    response_store: Literal["sqlite", "memory"] = Field(
        default="sqlite",
        description="Where responses with `store: true` and conversations are kept: in the folder, or as long as the "
        "server runs.",
    )
    max_stored_responses: int = Field(
        default=1000,
        ge=1,
        description="Most stored responses of one API key, and most conversations; older ones are dropped.",
    )
    max_stored_mib: int = Field(
        default=256,
        ge=1,
        description="Most MiB of stored responses of one API key, with their inputs, and most of conversations; older "
        "ones are dropped.",
    )
    stored_response_ttl: float = Field(
        default=2_592_000.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for which a response is stored, and a conversation after its last use.",
    )
    max_file_mib: int = Field(
        default=512, ge=1, description="Largest file that a client may upload, in MiB."
    )
    max_files_mib: int = Field(
        default=10_240,
        ge=1,
        description="Most MiB of files, with results of batches, of all API keys together. Each key has an "
        "equal share; with that, its uploads and new batches are refused, and those that run fail, until files "
        "are deleted.",
    )
    max_file_lines: int = Field(
        default=50_000, ge=1, description="Most lines of the input file of a batch, blank ones too."
    )
    batch_lines_beside_requests: int = Field(
        default=1,
        ge=1,
        description="Most lines of batches begun while other requests come, which wait for longer steps "
        "with more. Otherwise lines take the whole batch.",
    )
    warm_file: Path | None = Field(
        default=None,
        description="JSONL file of chat requests, or lines of batches, whose prompts are put into the prefix cache "
        "after the start, and stay there. Empty is none.",
    )
    max_images: int = Field(default=32, ge=0, description="Most images of a request.")
    max_image_mib: int = Field(default=20, ge=1, description="Largest file of an image, in MiB.")
    max_image_pixels: int = Field(
        default=40_000_000,
        ge=1,
        description="Most pixels of the file of an image; a model may get fewer.",
    )
    vision_pixels: int = Field(
        default=2_000_000,
        ge=1024,
        description="Most pixels that a model sees of an image; a larger one is scaled down. More of them are "
        "more tokens.",
    )
    media_workers: int = Field(
        default=2,
        ge=1,
        description="Most processes that read images, and as many for PDFs, one at a time each.",
    )
    media_domains: str = Field(
        default="",
        description="Hosts from which the server loads images that a request names by URL: names as they are, "
        "separated by commas, with a port if it is not 80 or 443. Empty is none.",
    )
    media_timeout: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds within which an image of a URL must be loaded.",
    )
    kv_events: str | None = Field(
        default=None,
        description="Endpoint at which changes of the default model's prefix cache are published for routers, as vLLM "
        "does, like `tcp://127.0.0.1:5557`: all that reach it can read prompts. Empty publishes nothing. It needs the "
        "extra `kv-events`.",
    )
    kv_events_replay: str | None = Field(
        default=None,
        description="Endpoint at which they can be asked for what they have missed. Empty is none.",
    )
    kv_events_topic: str = Field(default="", description="Topic of the messages with these events.")
    kv_events_buffer: int = Field(
        default=10_000, ge=1, description="Most messages that are kept for those who ask."
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        default="info", description="Least severe messages to log."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or one JSON object a line."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment and `.env` use former names."""
        for source in (env_settings, dotenv_settings):
            assert isinstance(source, EnvSettingsSource)
            source.env_vars = rename_former(source.env_vars)
        return init_settings, env_settings, dotenv_settings

    @field_validator(
        "generation_config",
        "pooling",
        "dtype",
        "kv_cache_dtype",
        "device",
        "native",
        "gpu_kernels",
        "cpu_precision",
        "response_store",
        "log_level",
        "log_format",
        "num_blocks",
        mode="before",
    )
    @classmethod
    def _ignore_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("max_num_seqs")
    @classmethod
    def _one_without_batching(cls, value: int, info: ValidationInfo) -> int:
        return value if info.data.get("enable_batching", True) else 1

    @field_validator(
        *("api_keys_file", "data_dir", "weights_cache_dir", "kv_cache_dir"),
        *("models_file", "models_dir", "warm_file"),
    )
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        # In a file or after `--flag=` no shell does.
        try:
            return None if path is None else path.expanduser()
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _has_a_prefix_cache(self) -> Self:
        for field in ("warm_file", "kv_events"):
            if getattr(self, field) is not None and not self.enable_prefix_cache:
                raise ValueError(f"{env_name(field)} needs {env_name('enable_prefix_cache')}")
        return self

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _is_endpoint(cls, text: str | None) -> str | None:
        if text is None:
            return None
        found = _ENDPOINT.fullmatch(text)
        # ZeroMQ would take a larger port modulo 65,536.
        if found is None or int(found[1] or 0) > _MAX_PORT:
            raise ValueError("an endpoint like tcp://127.0.0.1:5557")
        return text

    @field_validator("mcp_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        for origin in _split(text):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin: http or https, a host, and a port")
        return text

    @model_validator(mode="after")
    def _each_request_gets_a_token(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{env_name('max_num_batched_tokens')} ({self.max_num_batched_tokens}) must be at "
                f"least {env_name('max_num_seqs')} ({self.max_num_seqs}): each running request "
                "reads a token a step"
            )
        return self

    @property
    def served_model_id(self) -> str:
        """The name that clients use for the model.

        It is `model_id` if that is set, or else `served_name`.
        """
        return self.model_id or served_name(self.model)

    @property
    def allowed_origins(self) -> list[str]:
        return _split(self.cors_origins)

    @property
    def tool_origins(self) -> list[str]:
        return _split(self.mcp_origins)

    @property
    def media_hosts(self) -> list[str]:
        return _split(self.media_domains)

    @property
    def adapter_folders(self) -> list[Path]:
        return [*map(Path, _split(self.adapter_dirs))]

    @property
    def allowed_host_names(self) -> list[str]:
        return _split(self.allowed_hosts)


def served_name(model: str) -> str:
    """Return the name that clients use for a model which has no other.

    A hub id or the bundled model keeps its name, and of a file or directory only the last part is used, so
    that clients see no path of this machine.
    """
    if model.endswith(".gguf"):
        return Path(model).stem
    if model.startswith(("/", ".", "~")):
        return Path(os.path.expanduser(model)).resolve().name
    return model


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
