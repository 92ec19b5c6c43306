"""Downloads repositories into the hub's cache, checks them, and deletes them."""

import shutil
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import HfApi, constants, snapshot_download

from app.store.errors import CommandError
from app.store.found import cached_repositories
from app.store.hub import RemoteFile, Repository, endpoint, told
from app.store.partial_files import arrived_bytes, can_resume, resume
from batching import hub_files

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_FILES_AT_ONCE: Final = 2
# What the file system may need beside the files.
_SPARE: Final = 1 << 20


def bytes_to_fetch(repository: Repository) -> int:
    """Return the bytes that are not in the cache yet."""
    return sum(file.size - arrived_bytes(repository, file) for file in _missing_files(repository))


def _missing_files(repository: Repository) -> list[RemoteFile]:
    folder = repository.folder / "snapshots" / repository.commit
    return [file for file in repository.files if not (folder / file.name).is_file()]


def check_space(num_bytes: int) -> None:
    """Check that so many bytes have room in the cache.

    Raises:
        CommandError: they have not.
    """
    cache = Path(constants.HF_HUB_CACHE)
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes + _SPARE > free:
        raise CommandError(
            f"{_mib(num_bytes)} MiB do not fit on the disk of {cache}, where {_mib(free)} MiB are free: make "
            "room, or set HF_HOME"
        )


def download(repository: Repository) -> Path:
    """Download what is missing of a repository; what has arrived before is kept.

    Large files come last, one by one, so that a repository which is cut off is listed and can be deleted.

    Raises:
        CommandError: the hub has not given it, or the disk is full.
    """
    with told(repository.repo_id):
        large = [file for file in _missing_files(repository) if can_resume(file)]
        if large:
            _download_all(repository, but=large)
        for file in large:
            resume(repository, file)
        # Links them.
        return Path(_download_all(repository))


def _download_all(repository: Repository, but: Sequence[RemoteFile] = ()) -> str:
    return snapshot_download(
        repository.repo_id,
        allow_patterns=hub_files(),
        ignore_patterns=[escape(file.name) for file in but],
        endpoint=endpoint(),
        max_workers=_FILES_AT_ONCE,
    )


def verify(repository: Repository) -> int:
    """Compare all files with the hub's checksums; return how many there are.

    Raises:
        CommandError: some differ; these are deleted, so that they are downloaded again.
    """
    with told(repository.repo_id):
        result = HfApi(endpoint=endpoint()).verify_repo_checksums(
            repository.repo_id, revision=repository.commit
        )
    for mismatch in result.mismatches:
        _delete_file(Path(result.verified_path, mismatch["path"]))
    if result.mismatches:
        names = ", ".join(mismatch["path"] for mismatch in result.mismatches)
        raise CommandError(
            f"the checksum of {names} is wrong; what arrived is deleted: run the same command again"
        )
    return result.checked_count


def _delete_file(path: Path) -> None:
    """Delete a file of a snapshot and the blob that it links to."""
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def find_repository(repo_id: str) -> "CachedRepoInfo":
    """Return a repository of the hub's cache.

    Raises:
        CommandError: it is not there.
    """
    found = {repository.repo_id: repository for repository in cached_repositories()}
    if repo_id not in found:
        raise CommandError(f"{repo_id} is not in the hub's cache, {constants.HF_HUB_CACHE}")
    return found[repo_id]


def delete(repo_id: str) -> int:
    """Delete a repository from the hub's cache, and nothing outside of it; return the bytes that are free now.

    Raises:
        CommandError: it is not there, or cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir

    repository = find_repository(repo_id)
    commits = [revision.commit_hash for revision in repository.revisions]
    strategy = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*commits)
    strategy.execute()
    if repository.repo_path.exists():
        raise CommandError(f"{repository.repo_path} cannot be deleted")
    return strategy.expected_freed_size


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
