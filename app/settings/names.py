"""The names of settings: fields, and the variables that set them."""

from collections.abc import Mapping
from typing import Final

ENV_PREFIX: Final = "MLX_SERVER_"
# Former names of fields, which variables and flags may still use.
FORMER_NAMES: Final = {
    "batch_max_batch_size": "max_num_seqs",
    "batch_block_pool_size": "num_blocks",
    "max_batch_tokens": "max_num_batched_tokens",
}

# The key that commands of a terminal send; it is no setting of the server.
KEY_VARIABLE: Final = f"{ENV_PREFIX}API_KEY"


class SettingsError(Exception):
    """The settings are invalid; the message has one line for each variable at fault."""


def env_name(field: str) -> str:
    """Return the environment variable that sets a field."""
    return f"{ENV_PREFIX}{field}".upper()


def rename_former(variables: Mapping[str, str | None]) -> dict[str, str | None]:
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
