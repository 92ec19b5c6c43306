"""The configurations of the engine and of admission control, made from the settings."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from app.admission.controller import AdmissionLimits
from app.prompts.templates.request_template import check_template
from app.settings.files import text_of
from app.settings.names import SettingsError, env_name
from app.settings.settings import Settings
from batching import NO_DEFAULTS, RERANK_TEMPLATES, EngineConfig, SamplingDefaults

# A template has one of them, and a path hardly any.
_TEMPLATE_MARKS: Final = ("{{", "{%")


def admission_limits(settings: Settings) -> AdmissionLimits:
    return AdmissionLimits(**_shared(settings, AdmissionLimits))


def engine_config(
    settings: Settings,
    own: Mapping[str, Any] | None = None,
    sampling: SamplingDefaults = NO_DEFAULTS,
    *,
    has_adapters: bool = False,
) -> EngineConfig:
    """Return the configuration of an engine.

    own: what is set for this model only, by the names of fields.
    sampling: the defaults that the operator has set for this model.
    has_adapters: the file of models names adapters for it.

    Raises:
        SettingsError: a template cannot be read or compiled.
    """
    if own is not None:
        settings = settings.model_copy(update={"adapters": "", **own})
    has_adapters |= settings.allow_runtime_adapters or bool(settings.adapters)
    size = None if settings.num_blocks == "auto" else settings.num_blocks
    is_set = "num_blocks" in settings.model_fields_set
    named = RERANK_TEMPLATES.get(settings.rerank_template or "")
    derived = {
        "model_id": settings.served_model_id,
        "sampling_defaults": sampling,
        "max_num_seqs": settings.max_num_seqs if settings.enable_batching else 1,
        "max_adapters": settings.max_adapters if has_adapters else 0,
        "num_blocks": size if is_set else None,
        "max_blocks": size,
        "max_urgent_wait_ms": None
        if settings.max_urgent_wait_ms == "off"
        else settings.max_urgent_wait_ms,
        "chat_template": _template("chat_template", settings.chat_template),
        "rerank_template": named or _template("rerank_template", settings.rerank_template),
    }
    return EngineConfig(**_shared(settings, EngineConfig) | derived)


def _shared(settings: Settings, config: type[AdmissionLimits | EngineConfig]) -> dict[str, Any]:
    """Return the settings that have the name of a field of this dataclass."""
    return settings.model_dump(include={field.name for field in fields(config)})


def _template(field: str, template: str | None) -> str | None:
    """Return a template's text, read from a file unless it is given itself; None if it is not set.

    Raises:
        SettingsError: the template cannot be read or compiled.
    """
    if template is None:
        return None
    if not any(mark in template for mark in _TEMPLATE_MARKS):
        template = text_of(field, Path(template).expanduser())
    try:
        check_template(template)
    except ValueError as error:
        raise SettingsError(f"{env_name(field)} is no template: {error}") from None
    return template
