"""The file of models: TOML, with what is set for each of them."""

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from app.settings.engine_settings import EngineSettings
from app.settings.files import text_of
from app.settings.names import SettingsError, env_name

_FIELD: Final = "models_file"
# What is one for the whole process, or says which models there are.
_OF_THE_SERVER: Final = frozenset(
    {
        *("model", "model_id", "models", "models_file", "models_dir", "serve_hub_cache"),
        *("max_memory_gib", "min_resident", "load_timeout", "idle_unload", "max_choices"),
        *("enable_batching", "allow_request_chat_template", "aging_rate", "device", "native"),
        *("cpu_threads", "weights_cache_dir", "weights_cache_gib", "mlx_cache_mib"),
        *("wired_limit_mib", "gpu_kernels", "kv_cache_dir", "kv_cache_gib"),
        *("kv_cache_max_write_gib_per_day", "adapters", "allow_runtime_adapters", "adapter_dirs"),
    }
)


class Sampling(BaseModel):
    """The defaults of a model's sampling parameters, for requests that do not set them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


class ModelEntry(BaseModel):
    """A model of the file; `settings` has the settings of the server that it has otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)]
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    load_at_start: bool = False
    idle_unload: Annotated[float, Field(gt=0)] | None = None
    sampling: Sampling = Sampling()
    adapters: dict[str, Annotated[str, Field(min_length=1)]] = {}

    @property
    def settings(self) -> dict[str, Any]:
        own = ModelEntry.model_fields
        return {name: getattr(self, name) for name in self.model_fields_set if name not in own}


# Of any types by nature.
_SETTINGS: Final[dict[str, Any]] = {
    name: (field.annotation, field)
    for name, field in EngineSettings.model_fields.items()
    if name not in _OF_THE_SERVER
}
_Entry: Final = create_model("_Entry", __base__=ModelEntry, **_SETTINGS)


def read_models(path: Path) -> dict[str, ModelEntry]:
    """Return the models of a file by their ids: its tables `[models.ID]`.

    Raises:
        SettingsError: it cannot be read; the message names the line and the key of each mistake.
    """
    text = text_of(_FIELD, path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = f"line {len(text.splitlines())}"
        reason = str(error).replace("end of document", last)
        raise SettingsError(f"{env_name(_FIELD)}: {path}: {reason}") from None
    tables = document.get("models")
    if not isinstance(tables, dict) or not tables or len(document) > 1:
        reason = "it has tables [models.ID], at least one, and nothing else"
        raise SettingsError(f"{env_name(_FIELD)}: {path}: {reason}")
    mistakes: list[str] = []
    models: dict[str, ModelEntry] = {}
    for model_id, table in tables.items():
        try:
            models[model_id] = _Entry.model_validate(table)
        except ValidationError as error:
            mistakes += [_mistake(text, model_id, each) for each in error.errors()]
    if mistakes:
        lines = [f"{env_name(_FIELD)}: {path}, {mistake}" for mistake in mistakes]
        raise SettingsError("\n".join(lines))
    return models


def located(path: Path, model_id: str, message: str) -> str:
    """Say what is wrong with the settings of a model together."""
    line = _line_of(text_of(_FIELD, path), model_id, [])
    return f"{env_name(_FIELD)}: {path}, line {line}: models.{model_id}: {message}"


def _mistake(text: str, model_id: str, error: Mapping[str, Any]) -> str:
    """Say where a mistake is: the line of its key, or that of the table."""
    keys = [str(part) for part in error["loc"] if isinstance(part, str)]
    line = _line_of(text, model_id, keys[:1])
    name = ".".join([f"models.{model_id}", *keys])
    if error["type"] != "extra_forbidden":
        return f"line {line}: {name}: {error['msg']}"
    known = Sampling.model_fields if len(keys) > 1 else _Entry.model_fields
    near = get_close_matches(keys[-1], known, n=1) if keys else []
    hint = f"; did you mean {near[0]}?" if near else ""
    if keys and keys[-1] in _OF_THE_SERVER:
        hint = f"; it is one for all models: {env_name(keys[-1])}"
    return f"line {line}: {name} is not a setting of a model{hint}"


def _line_of(text: str, model_id: str, keys: list[str]) -> int:
    """Return the number of the line with a key of a model's table, or else of the table's header."""
    header = re.compile(rf"""\s*\[\s*models\s*\.\s*["']?{re.escape(model_id)}["']?\s*[.\]]""")
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines, 1) if header.match(line)]
    for start in starts:
        for number in range(start, len(lines) + 1):
            line = lines[number - 1]
            if number > start and line.lstrip().startswith("["):
                break
            if keys and re.match(rf"""\s*["']?{re.escape(keys[0])}["']?\s*[.=]""", line):
                return number
    return next(iter(starts), 1)
