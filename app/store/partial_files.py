"""Goes on with large files where an earlier download ended, also one of a process that was killed.

huggingface_hub 2 downloads into a file of a new name and deletes it when it fails, so that it goes on within one
process alone.  Here the part has the name of the content, as whole files have in the cache, and stays.
"""

from pathlib import Path
from typing import Final

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

from app.store.hub import RemoteFile, Repository, endpoint

# A smaller one is begun again.
_LARGE: Final = 8 << 20


def can_resume(file: RemoteFile) -> bool:
    """Return whether it is worth it; the largest are given by another protocol only."""
    return bool(file.sha256) and _LARGE <= file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE


def arrived_bytes(repository: Repository, file: RemoteFile) -> int:
    """Return how many bytes of a file that is not whole have arrived."""
    part = _part(repository, file)
    return part.stat().st_size if file.sha256 and part.is_file() else 0


def resume(repository: Repository, file: RemoteFile) -> None:
    """Download the rest of a file into the cache's blobs.

    Raises:
        OSError: of the disk, or more or less has come than the hub has announced.
        HfHubHTTPError: the hub does not give it.
    """
    part = _part(repository, file)
    lock = Path(constants.HF_HUB_CACHE, ".locks", repository.folder.name, f"{file.sha256}.lock")
    for path in (part, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if part.with_suffix("").exists():
            # Another process has been faster.
            return
        with part.open("ab", buffering=0) as output:
            http_get(
                hf_hub_url(
                    repository.repo_id, file.name, revision=repository.commit, endpoint=endpoint()
                ),
                output,
                resume_size=output.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
            )
        part.rename(part.with_suffix(""))


def _part(repository: Repository, file: RemoteFile) -> Path:
    return repository.folder / "blobs" / f"{file.sha256}.part"
