"""`models export`: the model of a GGUF file as programs that train read it."""

import argparse
from pathlib import Path
from typing import Final

from app.commands.errors import CommandError
from app.commands.output import print_json, size_text

# MLX multiplies float32 by far the fastest on a CPU.
_DTYPES: Final = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments beside the model's name."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty one")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default=_DTYPES[0],
        help=f"of the weights, which are dequantized; by default {_DTYPES[0]}, the fastest on a CPU",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the directory; return the exit status.

    Raises:
        CommandError: there is no such file or model, or the directory cannot be written.
    """
    from batching import ModelLoadError, export_gguf

    name, directory = arguments.name, arguments.directory.expanduser()
    path = _file_of(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CommandError(f"{directory} is not empty")
        export_gguf(path, directory, arguments.dtype)
        size = sum(file.stat().st_size for file in directory.iterdir())
    except ModelLoadError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {directory}: {error.strerror}") from None
    if arguments.json:
        print_json({"name": name, "path": str(directory), "dtype": arguments.dtype, "size": size})
    else:
        print(f"{name} is in {directory}: {size_text(size)} of {arguments.dtype}")
    return 0


def _file_of(name: str) -> Path:
    from app.settings import SettingsError, load_settings
    from app.store.found import find_model

    try:
        found = find_model(name, load_settings().models_dir)
    except SettingsError as error:
        raise CommandError(str(error)) from None
    if found is None:
        raise CommandError(f"{name} is not on this machine")
    if not found.path.is_file():
        raise CommandError(f"{found.path} is no GGUF file: mlx-lm loads it as it is")
    return found.path
