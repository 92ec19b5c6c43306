"""What a reference to an adapter may be: a folder, or a hub id."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from batching.adapters.files.adapter_config import CONFIG, MLX_LM_WEIGHTS, PEFT_WEIGHTS
from batching.errors import AdapterError, printable
from batching.model_files.references import is_hub_id

logger = logging.getLogger(__name__)

_WEIGHTS: Final = (MLX_LM_WEIGHTS, PEFT_WEIGHTS)


def resolve_adapter(reference: str, allowed: Sequence[Path] | None = None) -> Path:
    """Return the folder of a reference; downloads a hub repository if necessary.

    allowed: folders, in one of which it must be, whatever links lead to it; None for any, and for hub ids.

    Raises:
        AdapterError: there is none, or not in these folders.
    """
    try:
        path = Path(reference).expanduser()
        if allowed is not None:
            return _within(path.resolve(), reference, allowed)
    except (OSError, RuntimeError, ValueError):
        # No such user, links in a circle, a null character.
        raise _missing(reference) from None
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise AdapterError(f"{printable(reference)} is not the folder of an adapter")
    if not is_hub_id(reference):
        raise _missing(reference)
    return _download(reference)


def _missing(reference: str) -> AdapterError:
    return AdapterError(f"there is no folder {printable(reference)}")


def _within(path: Path, reference: str, allowed: Sequence[Path]) -> Path:
    # First of all, so that no client learns what else is on this machine.
    if not any(path.is_relative_to(folder.expanduser().resolve()) for folder in allowed):
        raise AdapterError(
            f"{printable(reference)} is not within the folders that adapters may be loaded from"
        )
    if not os.path.isdir(path):
        raise _missing(reference)
    return path


def _download(repository: str) -> Path:
    """Return the repository's files; a whole copy on this machine is used without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [CONFIG, *_WEIGHTS]
    with suppress(LocalEntryNotFoundError):
        found = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        if _is_whole(found):
            return found
    logger.info("downloading %s", repository)
    try:
        found = Path(snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:
        # Not found, not allowed, no connection, offline mode: the hub's client says which.
        reason = printable(f"{type(error).__name__}: {error}")
        raise AdapterError(
            f"there is no folder {repository}, and the hub has not given that adapter: {reason}"
        ) from error
    if not _is_whole(found):
        names = " or ".join(_WEIGHTS)
        raise AdapterError(f"{repository} has no {CONFIG} with {names}: no other adapters are read")
    return found


def _is_whole(folder: Path) -> bool:
    return (folder / CONFIG).exists() and any((folder / name).exists() for name in _WEIGHTS)
