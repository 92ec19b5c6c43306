"""`models`: the models on this machine, what they need, and how they get here."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from app.commands.errors import CommandError
from app.commands.output import add_json, print_json, size_text, table
from app.commands.stored import export
from app.commands.stored.confirmation import confirm

if TYPE_CHECKING:
    from app.store.facts import Facts, Fit
    from batching import MemoryEstimate

SUMMARY: Final = "list, show, check, pull, export and remove models"

_BAD: Final = 1
_HEAD: Final = ("NAME", "SIZE", "TYPE", "QUANTIZATION", "IMAGES", "NEEDS", "FITS", "MODIFIED")
_IMAGES: Final = {True: "yes", False: "no", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str, argument: str = "") -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        if argument:
            action.add_argument("name", metavar=argument)
        add_json(action)
        return action

    listed = add("list", "list the models on this machine, and whether they fit it")
    listed.add_argument("--fits", action="store_true", help="only those that fit")
    add("show", "show what is known of a model on this machine", "NAME")
    add("check", "compute what a model needs, also of the hub; status 1 if it does not fit", "NAME")
    add("pull", "download a model of the hub, or what is missing of it, and check it", "REPO")
    export.add_arguments(
        add("export", "write a GGUF file's model as mlx_lm reads it, such as to train", "NAME")
    )
    removed = add("rm", "delete a model from the hub's cache", "REPO")
    removed.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Run an action; return the exit status.

    Raises:
        CommandError: it cannot run; the message is one line.
    """
    return _ACTIONS[arguments.action](arguments)


def _fit() -> "tuple[Fit, Path | None]":
    """Return what the settings say of this machine, and the folder of models."""
    from app.settings import SettingsError, load_settings
    from app.settings.configs import engine_config
    from app.store.facts import Fit
    from batching import this_machine

    try:
        settings = load_settings()
        config = engine_config(settings)
    except SettingsError as error:
        raise CommandError(str(error)) from None
    return Fit(this_machine(config), config), settings.models_dir


def _list(arguments: argparse.Namespace) -> int:
    from app.store.facts import facts_of
    from app.store.found import find_models

    fit, models_dir = _fit()
    models = [facts_of(found, fit) for found in find_models(models_dir)]
    if arguments.fits:
        models = [facts for facts in models if facts["fits"]]
    if arguments.json:
        print_json(models)
    elif models:
        print(table(_HEAD, map(_row, models)))
        _say_how_to_see(models)
    else:
        print("no models are here; mlx-batch-server models pull REPO downloads one")
    return 0


def _say_how_to_see(models: "list[Facts]") -> None:
    from batching import HOW_TO_SEE

    if blind := sum(HOW_TO_SEE in (facts["no_vision"] or "") for facts in models):
        _say(f"{blind} more would take images with mlx-vlm: {HOW_TO_SEE}")


def _row(facts: "Facts") -> list[str]:
    needs = "-" if facts["needs"] is None else _at_least(facts, size_text(facts["needs"]))
    return [
        facts["name"],
        size_text(facts["size"]),
        facts["model_type"] or "-",
        facts["quantization"] or "-",
        _IMAGES[facts["vision"]],
        needs,
        _problem(facts) or _verdict(facts),
        facts["modified"][:10],
    ]


def _problem(facts: "Facts") -> str:
    """Return a problem in a few words: others have a path in them."""
    problem = facts["problem"] or ""
    return problem if problem.startswith("incomplete") else problem and "unknown: damaged"


def _at_least(facts: "Facts", text: str) -> str:
    """Mark a sum that lacks keys and values, which the config does not tell."""
    return text if facts["needs_is_complete"] else f"{text} + KV"


def _verdict(facts: "Facts") -> str:
    return f"no, {size_text(facts['missing'])} missing" if facts["missing"] else "yes"


def _show(arguments: argparse.Namespace) -> int:
    from app.store.facts import facts_of
    from app.store.found import find_model

    fit, models_dir = _fit()
    found = find_model(arguments.name, models_dir)
    if found is None:
        raise CommandError(
            f"{arguments.name} is not on this machine; mlx-batch-server models pull {arguments.name} "
            "downloads it"
        )
    facts = facts_of(found, fit)
    if arguments.json:
        print_json(facts)
    else:
        _print_facts(facts)
    return _BAD if facts["problem"] else 0


def _print_facts(facts: "Facts") -> None:
    kv = facts["kv_bytes_per_token"]
    known = "known once it is loaded"
    lines: dict[str, object] = {
        "name": facts["name"],
        "path": facts["path"],
        "problem": facts["problem"],
        "size": size_text(facts["size"]),
        "modified": facts["modified"],
        "type": facts["model_type"],
        "quantization": facts["quantization"],
        "context": f"{facts['context']} tokens" if facts["context"] else None,
        "layers": facts["layers"],
        "KV cache": known if kv is None else f"{size_text(kv)} a token",
        "served": facts["served"],
        "images": "takes images" if facts["vision"] else facts["no_vision"],
        "chat": "has a chat template" if facts["chat_template"] else "has no chat template",
        "tools": "its template shows tools" if facts["tools"] else "its template shows no tools",
        "needs": facts["needs"] and f"{_at_least(facts, size_text(facts['needs']))} at least",
        "fits": None if facts["fits"] is None else _verdict(facts),
    }
    _print_lines(lines)


def _print_lines(lines: dict[str, object]) -> None:
    width = max(map(len, lines))
    for name, value in lines.items():
        if value is not None:
            print(f"{name:<{width}}  {value}")


def _check(arguments: argparse.Namespace) -> int:
    from app.store.found import find_model
    from batching import ModelLoadError, describe

    fit, models_dir = _fit()
    found = find_model(arguments.name, models_dir)
    if found is None or found.problem:
        from app.store.hub import ask, describe_remote

        described = describe_remote(ask(arguments.name))
    else:
        try:
            described = describe(found.path)
        except ModelLoadError as error:
            raise CommandError(str(error)) from None
    needs, machine = fit.of(described), fit.machine
    missing = machine.missing(needs.least)
    if arguments.json:
        print_json(_check_document(arguments.name, needs, fit))
    else:
        _print_check(needs, fit)
    return _BAD if missing else 0


def _check_document(name: str, needs: "MemoryEstimate", fit: "Fit") -> dict[str, Any]:
    machine = fit.machine
    missing = machine.missing(needs.least)
    return {
        "name": name,
        "weights": needs.weights,
        "overhead": needs.overhead,
        "kv_bytes_per_token": needs.kv_bytes_per_token,
        "states": needs.states,
        "least_pool": {"blocks": needs.least_blocks, "bytes": needs.least_pool},
        "wanted_pool": {"blocks": needs.wanted_blocks, "bytes": needs.wanted_pool},
        "pool_here": {"blocks": needs.num_blocks_within(machine.memory)},
        "needs": needs.least,
        "needs_is_complete": needs.is_complete,
        "memory": machine.memory,
        "free": machine.free,
        "fits": not missing,
        "missing": missing,
    }


def _print_check(needs: "MemoryEstimate", fit: "Fit") -> None:
    machine, tokens = fit.machine, fit.config.block_size
    blocks = needs.num_blocks_within(machine.memory)
    free = "" if machine.free is None else f", of which {size_text(machine.free)} are free now"
    _print_lines(
        {
            "weights": size_text(needs.weights),
            "KV cache": _kv_text(needs, tokens),
            "states": f"{size_text(needs.states)} a request" if needs.states else None,
            "overhead": size_text(needs.overhead),
            "needs": f"{size_text(needs.least)} at least, {size_text(needs.wanted)} with the whole pool",
            "memory": f"{size_text(machine.memory)}{free}",
        }
    )
    if missing := machine.missing(needs.least):
        print(f"does not fit: {size_text(missing)} are missing")
    elif needs.is_complete:
        print(f"fits, with a pool of {blocks} blocks: {blocks * tokens} tokens of all requests")
    else:
        print("fits without keys and values, which are known once it is loaded")


def _kv_text(needs: "MemoryEstimate", tokens: int) -> str:
    if needs.kv_bytes_per_token is None:
        return "known once it is loaded"
    return (
        f"{size_text(needs.kv_bytes_per_token)} a token; {needs.wanted_blocks} blocks of {tokens} tokens are "
        f"{size_text(needs.wanted_pool or 0)}, the least {needs.least_blocks} are "
        f"{size_text(needs.least_pool or 0)}"
    )


def _pull(arguments: argparse.Namespace) -> int:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from app.store.download import bytes_to_fetch, check_space, download, verify
    from app.store.hub import ask

    if not sys.stderr.isatty():
        disable_progress_bars()
    repository = ask(arguments.name)
    to_fetch = bytes_to_fetch(repository)
    check_space(to_fetch)
    _say(
        f"pulling {arguments.name}: {len(repository.files)} files, {size_text(repository.size)}, of which "
        f"{size_text(repository.size - to_fetch)} are here"
    )
    path = download(repository)
    _say("comparing checksums ...")
    num_checked = verify(repository)
    if arguments.json:
        print_json({"name": arguments.name, "path": str(path), "size": repository.size})
    else:
        print(f"{arguments.name} is here, and all {num_checked} files are as on the hub: {path}")
    return 0


def _say(line: str) -> None:
    """Print a line about the progress, which is no part of the answer."""
    print(line, file=sys.stderr, flush=True)


def _remove(arguments: argparse.Namespace) -> int:
    from app.store.download import delete, find_repository

    repository = find_repository(arguments.name)
    if not arguments.yes:
        confirm(
            f"delete {arguments.name}, {size_text(repository.size_on_disk)}, from {repository.repo_path}?"
        )
    freed = delete(arguments.name)
    if arguments.json:
        print_json({"name": arguments.name, "freed": freed})
    else:
        print(f"{arguments.name} is deleted: {size_text(freed)} are free again")
    return 0


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "list": _list,
    "show": _show,
    "check": _check,
    "pull": _pull,
    "export": export.run,
    "rm": _remove,
}
