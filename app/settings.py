"""The settings: command-line flags, `MLX_SERVER_*` environment variables and lines of a `.env` file."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.admission.controller import AdmissionLimits
from app.http.authentication import read_keys, split_keys
from app.prompts.request_template import check_template
from app.storage.batch_storage import BatchStorage
from app.storage.data_dir import default_data_dir
from app.storage.files import FileLimits
from app.storage.folder_lock import FolderInUse
from app.storage.responses import ResponseStore, StoreLimits
from app.storage.storage import Storage, open_storage
from batching import RERANK_TEMPLATES, EngineConfig

logger = logging.getLogger(__name__)

ENV_PREFIX: Final = "MLX_SERVER_"
# Former names of fields, which variables and flags may still use.
FORMER_NAMES: Final = {
    "batch_max_batch_size": "max_num_seqs",
    "batch_block_pool_size": "num_blocks",
    "max_batch_tokens": "max_num_batched_tokens",
}
# A template has one of them, and a path hardly any.
_TEMPLATE_MARKS: Final = ("{{", "{%")


class SettingsError(Exception):
    """The settings are invalid; the message has one line for each variable at fault."""


class Settings(BaseSettings):
    """All settings of the server, validated.

    The environment overrides `.env`; flags override both (see `load_settings`).  An empty value counts as
    not set, and an unknown name in `.env` is an error.
    """

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
    max_num_seqs: int = Field(
        default=8,
        ge=1,
        validate_default=True,
        description="Most requests that share a step of the model.",
    )
    num_blocks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1024,
        description="KV cache blocks of 32 tokens, shared by all requests. Unless this is set, they take "
        "at most half of the free memory. `auto` takes as many as fit in `MLX_SERVER_MEMORY_FRACTION`.",
    )
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        description="Most tokens in one step; at least `MLX_SERVER_MAX_NUM_SEQS`.",
    )
    prefill_chunk: int = Field(
        default=256, ge=1, description="Most prompt tokens of one request in one step."
    )
    max_stall_ms: float = Field(
        default=250.0,
        gt=0,
        allow_inf_nan=False,
        description="Most milliseconds that prefill may add to a step of running streams; less where such a step is short and few prompts wait.",
    )
    max_draft_tokens: int = Field(
        default=7,
        ge=0,
        description="Most tokens drafted for one request in a step by prompt lookup, while few requests run; outputs are unchanged. 0 is off.",
    )
    enable_prefix_cache: bool = Field(
        default=True, description="Reuse the KV cache of prompts with a common prefix."
    )
    async_scheduling: bool = Field(
        default=True,
        description="Plan and queue a step while the one before it runs, where the native kernels run "
        "the model; outputs are unchanged.",
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
        "context. A number beyond that counts only where the model declares none.",
    )
    max_choices: int = Field(
        default=16, ge=1, le=128, description="Most choices for one prompt (`n`, `best_of`)."
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the device's memory for weights and KV cache together, if the number of blocks is `auto`.",
    )
    state_cache_mib: int | None = Field(
        default=None,
        ge=0,
        description="MiB that the prefix cache may keep of recurrent states, of models that have them; "
        "0 keeps none, so that no prefix is found. Without it, an eighth of the free memory.",
    )
    generation_config: Literal["auto", "openai"] = Field(
        default="auto",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty: `auto` takes those "
        "of the model's `generation_config.json` or GGUF file, `openai` always 1, 1, 0, 0 and 1.",
    )
    pooling: Literal["auto", "last", "mean", "cls", "off"] = Field(
        default="auto",
        description="What embeddings are made of: `auto` as the model's `modules.json` or GGUF file says, "
        "and none of a model that says nothing; `last`, `mean` and `cls` (the last token, all, the first) "
        "of any model; `off` makes none.",
    )
    rerank_template: str | None = Field(
        default=None,
        description="Template of a reranker's prompts, of the roles `query`, `document` and for an "
        "instruction `system`: `qwen3`, a file, or the text of a template. Empty takes the model's chat "
        "template if it has these roles, and `qwen3` for a model with `Qwen3-Reranker` in its name.",
    )
    rerank_tokens: str | None = Field(
        default=None,
        description="The two tokens by which a model says that a document is irrelevant, and that it is "
        "relevant, with a comma between them. Empty takes those of the model's files, or with a template "
        "`no,yes`.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template in place of the model's: a file, or the text of a template, which has "
        "`{{` or `{%`.",
    )
    allow_request_chat_template: bool = Field(
        default=False,
        description="Let a request bring a chat template, which is rendered in a process with limits.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights; `auto` keeps them as they are stored, but on a CPU without native kernels it is float32.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto",
        description="Type of the keys and values in the KV cache; `auto` is that of the model's activations, or bfloat16 with the native kernels in the precision `auto`. `int8` holds nearly four times as many tokens as `float32`, and needs the native kernels, or on a GPU those of its pool.",
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Device to compute on; `auto` is the GPU if there is one."
    )
    native: Literal["auto", "off", "require"] = Field(
        default="auto",
        description="Native CPU kernels: `auto` uses them if they are built; `require` does not start without.",
    )
    cpu_precision: Literal["auto", "exact"] = Field(
        default="auto",
        description="With native kernels: `exact` computes in float32. `auto` rounds the activations that are multiplied with quantized weights to 16 bits, or to 8 for weights of up to 4 bits where the processor has VNNI, and multiplies in bfloat16 where it has AMX; keys and values are bfloat16.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of the native kernels, at most one for each hardware thread that the process may use. Empty is one for each core, and from 8 on one fewer unless cores have several hardware threads.",
    )
    weights_cache_dir: Path | None = Field(
        default=None,
        description="Folder for the packed weights of models with more than 256 MiB, with which a second start takes seconds. Empty is the folder `mlx-batch-server` beside the cache of the hub.",
    )
    weights_cache_gib: int = Field(
        default=64,
        ge=0,
        description="Most GiB of packed weights in that folder; those used last stay. 0 keeps and reads none.",
    )
    gpu_kernels: Literal["auto", "off", "require"] = Field(
        default="off",
        description="Kernels that write and read the KV cache of a GPU in place: `auto` uses them if a check at the start finds them right; `require` does not start without. `off` until a report of `make gpu-check` on such a GPU is there.",
    )
    mlx_cache_mib: int = Field(
        default=1024,
        ge=0,
        description="On a GPU: most MiB of freed buffers that MLX keeps to use them again. Without a limit they grow "
        "with every new shape of a step, up to all the memory there is.",
    )
    wired_limit_mib: int | None = Field(
        default=None,
        ge=0,
        description="On a Mac: MiB that stay in memory for the GPU, and are never compressed or swapped. Empty is the "
        "weights and the KV cache; 0 is nothing.",
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
        default=4_194_304, ge=1024, description="Largest request body; larger ones get a 413."
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
        description="Where responses with `store: true` are kept: in the folder, or as long as the server "
        "runs.",
    )
    max_stored_responses: int = Field(
        default=1000,
        ge=1,
        description="Most stored responses of one API key; older ones are dropped.",
    )
    max_stored_mib: int = Field(
        default=256,
        ge=1,
        description="Most MiB of stored responses of one API key, with their inputs; older ones are dropped.",
    )
    stored_response_ttl: float = Field(
        default=2_592_000.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for which a response is stored.",
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
        default=50_000,
        ge=1,
        description="Most lines of the input file of a batch, blank ones too.",
    )
    batch_lines_beside_requests: int = Field(
        default=1,
        ge=1,
        description="Most lines of batches begun while other requests come, which wait for longer steps "
        "with more. Otherwise lines take the whole batch.",
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
            source.env_vars = _renamed(source.env_vars)
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

    @field_validator("api_keys_file", "data_dir", "weights_cache_dir")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        # In a file or after `--flag=` no shell does.
        try:
            return None if path is None else path.expanduser()
        except RuntimeError as error:
            raise ValueError(str(error)) from None

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

        It is `model_id` if that is set.  Otherwise a hub id or the bundled model keeps its name, and of a file
        or directory only the last part is used, so that clients see no path of this machine.
        """
        if self.model_id is not None:
            return self.model_id
        if self.model.endswith(".gguf"):
            return Path(self.model).stem
        if self.model.startswith(("/", ".", "~")):
            return Path(os.path.expanduser(self.model)).resolve().name
        return self.model

    @property
    def allowed_origins(self) -> list[str]:
        return _split(self.cors_origins)

    @property
    def allowed_host_names(self) -> list[str]:
        return _split(self.allowed_hosts)

    def client_keys(self) -> list[str]:
        """Return the API keys from all sources, admin keys included; without any the server asks for none.

        Raises:
            SettingsError: the file cannot be read, or a key is invalid.
        """
        keys = self.admin_key_list() + _listed_keys("api_keys", self.api_keys)
        if self.api_keys_file is None:
            return keys
        text = _text_of("api_keys_file", self.api_keys_file)
        return keys + _keys("api_keys_file", read_keys, text)

    def admin_key_list(self) -> list[str]:
        """Return the API keys that may also watch the server.

        Raises:
            SettingsError: a key is invalid.
        """
        return _listed_keys("admin_keys", self.admin_keys)

    def chat_template_text(self) -> str | None:
        """Return the chat template that replaces the model's; None keeps that.

        Raises:
            SettingsError: the template cannot be read or compiled.
        """
        return _template("chat_template", self.chat_template)

    def rerank_template_text(self) -> str | None:
        """Return the template of a reranker's prompts: a built-in one by name, or from a file; None without.

        Raises:
            SettingsError: the template cannot be read or compiled.
        """
        named = RERANK_TEMPLATES.get(self.rerank_template or "")
        return named or _template("rerank_template", self.rerank_template)

    def store_limits(self) -> StoreLimits:
        return StoreLimits(
            self.max_stored_responses, self.stored_response_ttl, self.max_stored_mib << 20
        )

    def open_storage(self) -> Storage:
        """Open the storage of responses, files and batches.

        If no folder is set and the platform's default cannot be written, it returns storage that ends with
        the process, and logs a warning.

        Raises:
            SettingsError: the folder that is set cannot be read or written, or another server uses the folder.
        """
        try:
            return open_storage(
                self.data_dir or default_data_dir(),
                self.store_limits(),
                keeps_responses=self.response_store == "sqlite",
                files=self.file_limits(),
            )
        except FolderInUse as error:
            raise SettingsError(f"{env_name('data_dir')}: {error}") from None
        except (OSError, RuntimeError) as error:
            # Path raises the latter where no home directory is known.
            reason = f"cannot be used: {error}"
            if self.data_dir is not None:
                raise SettingsError(f"{env_name('data_dir')} {reason}") from None
            logger.warning("the folder for data %s; what is stored ends with the server", reason)
            return self.temporary_storage()

    def temporary_storage(self) -> Storage:
        """Return storage that ends with the process."""
        return Storage(ResponseStore(self.store_limits()), batch=BatchStorage(self.file_limits()))

    def file_limits(self) -> FileLimits:
        """Return the limits of the files of each key.

        Raises:
            SettingsError: the keys cannot be read.
        """
        num_keys = len(set(self.client_keys()))
        return FileLimits(self.max_file_mib << 20, (self.max_files_mib << 20) // max(1, num_keys))

    def limits(self) -> AdmissionLimits:
        """Return the limits of admission control."""
        return AdmissionLimits(**self._shared_with(AdmissionLimits))

    def engine_config(self) -> EngineConfig:
        """Return the configuration of the engine.

        Raises:
            SettingsError: a template cannot be read or compiled.
        """
        size = None if self.num_blocks == "auto" else self.num_blocks
        is_set = "num_blocks" in self.model_fields_set
        derived = {
            "model_id": self.served_model_id,
            "num_blocks": size if is_set else None,
            "max_blocks": size,
            "chat_template": self.chat_template_text(),
            "rerank_template": self.rerank_template_text(),
        }
        return EngineConfig(**self._shared_with(EngineConfig) | derived)

    def _shared_with(self, config: type[AdmissionLimits | EngineConfig]) -> dict[str, Any]:
        """Return the settings that have the name of a field of this dataclass."""
        return self.model_dump(include={field.name for field in fields(config)})


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _template(field: str, template: str | None) -> str | None:
    """Return a template's text, read from a file unless it is given itself; None if it is not set.

    Raises:
        SettingsError: the template cannot be read or compiled.
    """
    if template is None:
        return None
    if not any(mark in template for mark in _TEMPLATE_MARKS):
        template = _text_of(field, Path(template).expanduser())
    try:
        check_template(template)
    except ValueError as error:
        raise SettingsError(f"{env_name(field)} is no template: {error}") from None
    return template


def _text_of(field: str, path: Path) -> str:
    """Return the text of a field's file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{env_name(field)} cannot be read: {path}: {reason}") from None


def _listed_keys(field: str, value: SecretStr) -> list[str]:
    """Return the comma-separated keys of a setting; an empty setting has none."""
    text = value.get_secret_value()
    return _keys(field, split_keys, text) if text else []


def _keys(field: str, read: Callable[[str], list[str]], text: str) -> list[str]:
    """Return the keys of a source; it must have some, or the server would be open to every client."""
    try:
        keys = read(text)
    except ValueError as error:
        raise SettingsError(f"{env_name(field)}: {error}") from None
    if not keys:
        raise SettingsError(f"{env_name(field)} holds no key")
    return keys


def env_name(field: str) -> str:
    """Return the environment variable that sets a field."""
    return f"{ENV_PREFIX}{field}".upper()


def _renamed(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables with the fields' names of today; the names are in lower case.

    Raises:
        SettingsError: both names of a field are set.
    """
    renamed = dict(variables)
    for former, field in FORMER_NAMES.items():
        old, new = env_name(former), env_name(field)
        if old.lower() not in renamed:
            continue
        if new.lower() in renamed:
            raise SettingsError(f"{old} is the former name of {new}: set one of them, not both")
        renamed[new.lower()] = renamed.pop(old.lower())
    return renamed


def load_settings(flags: Mapping[str, str] | None = None) -> Settings:
    """Return the settings from `flags` (values by field name), the environment and `.env`, in this order.

    Raises:
        SettingsError: with one line for each invalid value, by the variable's name.
    """
    given: dict[str, Any] = dict(flags or {})
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_lines(error.errors()))) from None
    except (OSError, UnicodeError) as error:
        raise SettingsError(f".env cannot be read: {error}") from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each `MLX_SERVER_*` variable of the environment that is not a setting.

    pydantic-settings rejects such a line in `.env` but does not look for one in the environment.
    """
    known = {env_name(field) for field in (*Settings.model_fields, *FORMER_NAMES)}
    ours = (name for name in sorted(environ) if name.upper().startswith(ENV_PREFIX))
    return [_unknown(name) for name in ours if name.upper() not in known]


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
