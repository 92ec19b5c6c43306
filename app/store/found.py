"""Finds the models on this machine: the bundled one, those in the hub's cache, and those of a folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from app.store.errors import CommandError
from batching import BUNDLED_MODEL, HOW_TO_BUNDLE, bundled_file, is_hub_id, missing_files

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_CONFIG: Final = "config.json"
_GGUF: Final = ".gguf"


class Place(StrEnum):
    """Where a model is."""

    BUNDLED = "bundled"
    CACHE = "cache"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this machine.

    name: what `--model` takes.
    path: its file or directory.
    size: the bytes of all its files.
    modified: seconds since 1970.
    problem: why it cannot be served; empty if nothing is known.
    """

    name: str
    place: Place
    path: Path
    size: int
    modified: float
    problem: str = ""


def find_models(models_dir: Path | None) -> list[FoundModel]:
    """Return all models, those of one place together."""
    return [*_bundled(), *_in_cache(), *(_in_folder(models_dir) if models_dir else ())]


def find_model(name: str, models_dir: Path | None) -> FoundModel | None:
    """Return the model that a name, a path or a hub id means; None if it is a hub id that is not here.

    Raises:
        CommandError: there is no such model.
    """
    for model in find_models(models_dir):
        if name in (model.name, str(model.path)) or name == _short_name(model):
            return model
    path = Path(name).expanduser()
    if (path.suffix == _GGUF and path.is_file()) or (path / _CONFIG).is_file():
        return _of_path(path, name)
    if name == BUNDLED_MODEL:
        raise CommandError(f"the bundled model {name} is not installed: {HOW_TO_BUNDLE}")
    if path.exists():
        raise CommandError(f"{name} is neither a .gguf file nor a directory with a config.json")
    if not is_hub_id(name) or path.suffix == _GGUF:
        raise CommandError(f"there is no model {name} here, and it is no id of the hub")
    return None


def _short_name(model: FoundModel) -> str | None:
    """Return the name of a folder's model without the folder."""
    if model.place is not Place.FOLDER:
        return None
    return model.path.stem if model.path.suffix == _GGUF else model.path.name


def _bundled() -> Iterator[FoundModel]:
    if (path := bundled_file()) is not None:
        stat = path.stat()
        yield FoundModel(BUNDLED_MODEL, Place.BUNDLED, path, stat.st_size, stat.st_mtime)


def _in_cache() -> list[FoundModel]:
    repositories = sorted(cached_repositories(), key=lambda repository: repository.repo_id)
    return [model for each in repositories if (model := _of_repository(each)) is not None]


def cached_repositories() -> list["CachedRepoInfo"]:
    """Return the repositories of models in the hub's cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
        return [each for each in repositories if each.repo_type == "model"]
    except CacheNotFound:
        return []


def _of_repository(repository: "CachedRepoInfo") -> FoundModel | None:
    """Return the model that a repository's main branch is, or what was downloaded last."""
    revisions = sorted(
        repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified)
    )
    if not revisions:
        return None
    path = revisions[-1].snapshot_path
    missing = sorted(missing_files(path) - {"tokenizer*"})
    problem = f"incomplete: {missing[0]} is missing" if missing else ""
    return FoundModel(
        repository.repo_id,
        Place.CACHE,
        path,
        repository.size_on_disk,
        repository.last_modified,
        problem,
    )


def _in_folder(folder: Path) -> Iterator[FoundModel]:
    """Yield the files and directories right inside of a folder.

    Raises:
        CommandError: it cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise CommandError(f"cannot read {folder}: {error.strerror}") from None
    for path in paths:
        if path.suffix == _GGUF or (path / _CONFIG).is_file():
            yield _of_path(path, str(path))


def _of_path(path: Path, name: str) -> FoundModel:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    stats = [file.stat() for file in files]
    return FoundModel(
        name,
        Place.FOLDER,
        path,
        sum(stat.st_size for stat in stats),
        max((stat.st_mtime for stat in stats), default=0.0),
    )
