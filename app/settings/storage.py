"""Opens the storage that the settings describe."""

import logging

from app.settings.keys import client_keys
from app.settings.names import SettingsError, env_name
from app.settings.settings import Settings
from app.storage.batch_storage import BatchStorage
from app.storage.disk.data_dir import default_data_dir
from app.storage.disk.folder_lock import FolderInUse
from app.storage.files import FileLimits
from app.storage.responses.limits import StoreLimits
from app.storage.responses.store import ResponseStore
from app.storage.storage import Storage, open_folder

logger = logging.getLogger(__name__)


def open_storage(settings: Settings) -> Storage:
    """Open the storage of responses, files and batches.

    If no folder is set and the platform's default cannot be written, it returns storage that ends with
    the process, and logs a warning.

    Raises:
        SettingsError: the folder that is set cannot be read or written, or another server uses the folder.
    """
    try:
        return open_folder(
            settings.data_dir or default_data_dir(),
            store_limits(settings),
            keeps_responses=settings.response_store == "sqlite",
            files=file_limits(settings),
        )
    except FolderInUse as error:
        raise SettingsError(f"{env_name('data_dir')}: {error}") from None
    except (OSError, RuntimeError) as error:
        # Path raises the latter where no home directory is known.
        reason = f"cannot be used: {error}"
        if settings.data_dir is not None:
            raise SettingsError(f"{env_name('data_dir')} {reason}") from None
        logger.warning("the folder for data %s; what is stored ends with the server", reason)
        return temporary_storage(settings)


def temporary_storage(settings: Settings) -> Storage:
    """Return storage that ends with the process."""
    return Storage(ResponseStore(store_limits(settings)), batch=BatchStorage(file_limits(settings)))


def store_limits(settings: Settings) -> StoreLimits:
    return StoreLimits(
        settings.max_stored_responses, settings.stored_response_ttl, settings.max_stored_mib << 20
    )


def file_limits(settings: Settings) -> FileLimits:
    """Return the limits of the files of each key; the keys share the space equally.

    Raises:
        SettingsError: the keys cannot be read.
    """
    num_keys = len(set(client_keys(settings)))
    return FileLimits(
        settings.max_file_mib << 20, (settings.max_files_mib << 20) // max(1, num_keys)
    )
