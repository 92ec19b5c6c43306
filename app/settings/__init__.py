"""The settings: command-line flags, `MLX_SERVER_*` environment variables and lines of a `.env` file."""

from app.settings.load import load_settings, unknown_variables
from app.settings.names import ENV_PREFIX, FORMER_NAMES, SettingsError, env_name
from app.settings.settings import Settings

__all__ = [
    "ENV_PREFIX",
    "FORMER_NAMES",
    "Settings",
    "SettingsError",
    "env_name",
    "load_settings",
    "unknown_variables",
]
