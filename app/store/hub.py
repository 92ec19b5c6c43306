"""Asks the hub for what a repository has, and says in one line why it gives nothing."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from app.store.errors import CommandError
from batching import ModelDescription, ModelLoadError, hub_files, is_hub_id, outline, read_config

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "model*.safetensors"
_REFUSED: Final = (401, 403)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class RemoteFile(NamedTuple):
    """A file of a repository; sha256 is None for those that git itself keeps, which are small."""

    name: str
    size: int
    sha256: str | None


class Repository(NamedTuple):
    """The files of a repository that are downloaded, at the commit that its main branch is now."""

    repo_id: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def folder(self) -> Path:
        """Return where the hub's cache keeps it."""
        return Path(constants.HF_HUB_CACHE, f"models--{self.repo_id.replace('/', '--')}")


def endpoint() -> str:
    """Return the address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def ask(repo_id: str) -> Repository:
    """Ask the hub for the files of a repository.

    Raises:
        CommandError: there is none, it is not given, or there is no connection.
    """
    if not is_hub_id(repo_id):
        raise CommandError(f"{repo_id} is no id of a model on the hub, which is like owner/name")
    with told(repo_id):
        info = HfApi(endpoint=endpoint()).model_info(repo_id, files_metadata=True)
    files = tuple(
        RemoteFile(
            sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None
        )
        for sibling in info.siblings or ()
        if any(fnmatch(sibling.rfilename, pattern) for pattern in hub_files())
    )
    names = [file.name for file in files]
    if _CONFIG not in names or not any(fnmatch(name, _WEIGHTS) for name in names):
        raise CommandError(
            f"{repo_id} is no model that mlx-lm reads: it has no {_CONFIG} with {_WEIGHTS}"
        )
    return Repository(repo_id, str(info.sha), files)


def describe_remote(repository: Repository) -> ModelDescription:
    """Describe a model that is not here by its config, which is downloaded, and by its sizes.

    Raises:
        CommandError: the hub does not give it, or it is none.
    """
    with TemporaryDirectory() as folder, told(repository.repo_id):
        path = hf_hub_download(
            repository.repo_id,
            _CONFIG,
            revision=repository.commit,
            local_dir=folder,
            endpoint=endpoint(),
        )
        try:
            config = read_config(Path(path))
        except ModelLoadError as error:
            raise CommandError(str(error)) from None
    weights = sum(file.size for file in repository.files if fnmatch(file.name, _WEIGHTS))
    return outline(config, weights, repository.size)


@contextmanager
def told(repo_id: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line."""
    try:
        yield
    except GatedRepoError:
        raise CommandError(
            f"{repo_id} is gated: accept its terms at {endpoint()}/{repo_id}, then set HF_TOKEN or run "
            "hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise CommandError(
            f"{endpoint()} has no model {repo_id}, or it is private: check the name, or set HF_TOKEN"
        ) from None
    except (EntryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CommandError(f"{repo_id}: {_first_line(error)}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "set HF_TOKEN" if status in _REFUSED else "try again later"
        raise CommandError(f"{endpoint()} has answered {status}: {advice}") from None
    except OfflineModeIsEnabled:
        raise CommandError("HF_HUB_OFFLINE is set, so that nothing is downloaded") from None
    except OSError as error:
        raise CommandError(_of_system(repo_id, error)) from None
    except Exception as error:
        if not _is_of_connection(error):
            raise
        raise CommandError(
            f"no connection to {endpoint()}: {_first_line(error)}; what has arrived is kept"
        ) from None


def _of_system(repo_id: str, error: OSError) -> str:
    if error.errno in _NO_SPACE:
        return (
            f"the disk of {constants.HF_HUB_CACHE} is full; what has arrived is kept, and the same command "
            "fetches the rest once there is room"
        )
    reason = error.strerror or _first_line(error)
    return f"{repo_id} cannot be downloaded: {reason}"


def _is_of_connection(error: Exception) -> bool:
    """Return whether an exception is one of the HTTP client, whichever package that is."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
