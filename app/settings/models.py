"""The models that the settings name."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from app.settings.configs import engine_config
from app.settings.models_file import ModelEntry, located, read_models
from app.settings.names import SettingsError, env_name
from app.settings.settings import Settings, served_name
from batching import SamplingDefaults, ServedModel


def served_models(settings: Settings, found: Mapping[str, str] | None = None) -> list[ServedModel]:
    """Return the models that requests may name, the default first.

    found: references by the names of the models that the operator's folders hold.  Those that are named
        otherwise, or have a name that another model has, are left out.

    Raises:
        SettingsError: two models have the same name, or something is wrong with one of them.
    """
    if settings.allow_runtime_adapters and not settings.adapter_folders:
        setting = env_name("allow_runtime_adapters")
        raise SettingsError(f"{setting} needs {env_name('adapter_dirs')}, where adapters may be")
    models = [*_of_file(settings), *_of_variables(settings)]
    if settings.models_file is None or "model" in settings.model_fields_set:
        models.insert(0, _default(settings))
    elif settings.model_id is not None:
        raise SettingsError(
            f"{env_name('model_id')} is the name of {env_name('model')}, which is not set: "
            f"{env_name('models_file')} has the names of its models"
        )
    elif settings.adapters:
        raise SettingsError(
            f"{env_name('adapters')} are those of {env_name('model')}, which is not set: "
            f"{env_name('models_file')} has a table [models.ID.adapters] for each of its models"
        )
    names = _checked_names(models)
    references = {model.config.model for model in models}
    for name, reference in (found or {}).items():
        if name not in names and reference not in references:
            models.append(_model(settings, name, reference))
    return models


def _default(settings: Settings) -> ServedModel:
    return ServedModel(
        config=engine_config(settings),
        loads_at_start=True,
        idle_unload=settings.idle_unload,
        adapters=_adapters(settings),
    )


def _adapters(settings: Settings) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for item in filter(None, map(str.strip, settings.adapters.split(","))):
        name, _, reference = map(str.strip, item.partition("="))
        if not name or not reference:
            message = f"'{item}' lacks a name or a folder: it is name=folder, or name=hub id"
            raise SettingsError(f"{env_name('adapters')}: {message}")
        if name in adapters:
            raise SettingsError(f"{env_name('adapters')}: two adapters are named '{name}'")
        adapters[name] = reference
    return adapters


def _of_variables(settings: Settings) -> Iterator[ServedModel]:
    for item in filter(None, map(str.strip, settings.models.split(","))):
        name, has_name, reference = item.partition("=")
        yield (
            _model(settings, name, reference)
            if has_name
            else _model(settings, served_name(item), item)
        )


def _model(settings: Settings, name: str, reference: str) -> ServedModel:
    if not name or not reference:
        raise SettingsError(f"{env_name('models')}: '{name}={reference}' lacks a name or a model")
    config = engine_config(settings, {"model": reference, "model_id": name})
    return ServedModel(config=config, idle_unload=settings.idle_unload)


def _of_file(settings: Settings) -> Iterator[ServedModel]:
    if settings.models_file is None:
        return
    for model_id, entry in read_models(settings.models_file).items():
        yield _of_entry(settings, model_id, entry)


def _of_entry(settings: Settings, model_id: str, entry: ModelEntry) -> ServedModel:
    own: dict[str, Any] = {"model": entry.model, "model_id": model_id, **entry.settings}
    sampling = SamplingDefaults(**entry.sampling.model_dump())
    try:
        config = engine_config(settings, own, sampling, has_adapters=bool(entry.adapters))
    except ValueError as error:
        assert settings.models_file is not None
        raise SettingsError(located(settings.models_file, model_id, str(error))) from None
    return ServedModel(
        config=config,
        aliases=entry.aliases,
        is_pinned=entry.pinned,
        loads_at_start=entry.load_at_start or entry.pinned,
        idle_unload=entry.idle_unload or settings.idle_unload,
        adapters=entry.adapters,
    )


def _checked_names(models: Iterable[ServedModel]) -> set[str]:
    """Return all names of the models and of their adapters.

    Raises:
        SettingsError: two have the same one.
    """
    names: set[str] = set()
    for model in models:
        for name in (model.model_id, *model.aliases, *model.adapters):
            if name in names:
                raise SettingsError(
                    f"two models or adapters are named '{name}': see {env_name('model')}, {env_name('models')}, "
                    f"{env_name('adapters')} and {env_name('models_file')}"
                )
            names.add(name)
    return names
