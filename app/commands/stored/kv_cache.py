"""`cache`: the keys and values on disk, which outlive the server."""

import argparse
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from app.commands.errors import CommandError
from app.commands.output import add_json, print_json, size_text, table
from app.commands.stored.confirmation import confirm

if TYPE_CHECKING:
    from batching import StoredCache

SUMMARY: Final = "list, delete and check the keys and values that are kept on disk"

_BAD: Final = 1
_HEAD: Final = ("IDENTITY", "MODEL", "ENTRIES", "SIZE", "LAST USE", "LOADED")
# So many digits of an identity tell all apart.
_NUM_DIGITS: Final = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        action.add_argument(
            "--dir", type=Path, metavar="FOLDER", help="instead of MLX_SERVER_KV_CACHE_DIR"
        )
        add_json(action)
        return action

    add("ls", "list what is kept of each model, and whether a server has it loaded")
    removed = add("rm", "delete what is kept of a model that no server has loaded")
    what = removed.add_mutually_exclusive_group(required=True)
    what.add_argument("identity", nargs="?", help="as ls shows it, or its beginning")
    what.add_argument(
        "--all", action="store_true", help="of all models; status 1 if one is loaded, and stays"
    )
    removed.add_argument("--yes", action="store_true", help="do not ask")
    checked = add("verify", "read all that is kept; status 1 if some of it is damaged, and stays")
    checked.add_argument("--delete", action="store_true", help="delete what is damaged")


def run(arguments: argparse.Namespace) -> int:
    """Run an action; return the exit status.

    Raises:
        CommandError: it cannot run; the message is one line.
    """
    folder = _folder(arguments.dir)
    try:
        return _ACTIONS[arguments.action](folder, arguments)
    except OSError as error:
        raise CommandError(f"cannot use {folder}: {error.strerror}") from None


def _folder(named: Path | None) -> Path:
    if named is not None:
        return named.expanduser()
    from app.settings import SettingsError, load_settings

    try:
        folder = load_settings().kv_cache_dir
    except SettingsError as error:
        raise CommandError(str(error)) from None
    if folder is None:
        raise CommandError("no folder is set: MLX_SERVER_KV_CACHE_DIR or --dir names one")
    return folder


def _list(folder: Path, arguments: argparse.Namespace) -> int:
    from batching import stored_caches

    caches = stored_caches(folder)
    if arguments.json:
        print_json([_document(cache) for cache in caches])
    elif caches:
        print(table(_HEAD, map(_row, caches)))
    else:
        print(f"nothing is kept in {folder}")
    return 0


def _document(cache: "StoredCache") -> dict[str, Any]:
    return {**cache._asdict(), "made": _time(cache.made), "used": _time(cache.used)}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _row(cache: "StoredCache") -> list[str]:
    return [
        cache.identity[:_NUM_DIGITS],
        cache.model or "-",
        str(cache.num_entries),
        size_text(cache.num_bytes),
        (_time(cache.used) or "-")[:10],
        "yes" if cache.is_loaded else "no",
    ]


def _remove(folder: Path, arguments: argparse.Namespace) -> int:
    from batching import stored_caches

    caches = stored_caches(folder)
    chosen = caches if arguments.all else [_find(arguments.identity, caches, folder)]
    unused = [cache for cache in chosen if not cache.is_loaded]
    if unused and not arguments.yes:
        size = size_text(sum(cache.num_bytes for cache in unused))
        confirm(f"delete {', '.join(map(_name, unused))}, {size}, from {folder}?")
    freed = {cache: _delete(folder, cache) for cache in chosen}
    deleted = [cache for cache, num_bytes in freed.items() if num_bytes is not None]
    loaded = [cache for cache, num_bytes in freed.items() if num_bytes is None]
    total = sum(num_bytes or 0 for num_bytes in freed.values())
    if arguments.json:
        names = {"deleted": deleted, "loaded": loaded}
        document = {name: [cache.identity for cache in found] for name, found in names.items()}
        print_json({**document, "freed": total})
        return _BAD if loaded else 0
    for cache in loaded:
        print(f"{_name(cache)} is loaded by a server, and stays")
    for cache in deleted:
        print(f"{_name(cache)} is deleted")
    print(f"{size_text(total)} are free again")
    return _BAD if loaded else 0


def _find(beginning: str, caches: "Sequence[StoredCache]", folder: Path) -> "StoredCache":
    found = [cache for cache in caches if cache.identity.startswith(beginning)]
    # A shell's variable may be empty.
    if not found or not beginning:
        raise CommandError(
            f"nothing in {folder} begins with {beginning!r}; cache ls lists what is there"
        )
    if len(found) > 1:
        raise CommandError(f"{beginning} is the beginning of {' and '.join(map(_name, found))}")
    return found[0]


def _delete(folder: Path, cache: "StoredCache") -> int | None:
    """Return how many bytes were deleted; None if a server has loaded the model, maybe just now."""
    from batching import CacheInUse, delete_cache

    try:
        return delete_cache(folder, cache.identity)
    except CacheInUse:
        return None


def _name(cache: "StoredCache") -> str:
    digits = cache.identity[:_NUM_DIGITS]
    return f"{digits} ({cache.model})" if cache.model else digits


def _verify(folder: Path, arguments: argparse.Namespace) -> int:
    from batching import check_caches

    num_checked, damaged = 0, []
    for file in check_caches(folder, delete=arguments.delete):
        num_checked += 1
        if file.problem:
            damaged.append(file)
            if not arguments.json:
                print(f"{file.path}: {file.problem}{'; deleted' * file.is_deleted}", flush=True)
    if arguments.json:
        files = [{**file._asdict(), "path": str(file.path)} for file in damaged]
        print_json({"checked": num_checked, "damaged": files})
    else:
        print(f"{num_checked} files checked, {len(damaged) or 'none'} damaged")
    return _BAD if any(not file.is_deleted for file in damaged) else 0


_ACTIONS: Final[dict[str, Callable[[Path, argparse.Namespace], int]]] = {
    "ls": _list,
    "rm": _remove,
    "verify": _verify,
}
