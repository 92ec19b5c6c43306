"""`python -m scripts.cluster`: servers behind a router on this machine, until Ctrl-C or SIGTERM."""

import argparse
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from scripts.cluster.cluster import Cluster
from scripts.cluster.ports import PortInUse
from scripts.cluster.router import ROUTERS, NotInstalled
from scripts.server_process import ServerFailed, environment_settings

_FAILED: Final = 1
_UNUSABLE: Final = 2
_INTERRUPTED: Final = 130
_MAX_PORT: Final = 65_535
_OTHER_KEYS: Final = {"api_keys_file", "admin_keys"}
_POLL_INTERVAL: Final = 0.1
_SUPERVISION_INTERVAL: Final = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; return 2 for what cannot be used, 1 if a server does not start."""
    parser = _parser()
    args = parser.parse_args(argv)
    settings = environment_settings()
    if fault := _fault(settings, args.router):
        parser.error(fault)
    ended = _signalled()
    with TemporaryDirectory() as temporary:
        try:
            with _cluster(args, settings, args.data or Path(temporary)) as cluster:
                _run(cluster, ended)
        except (NotInstalled, PortInUse, OSError) as error:
            print(error, file=sys.stderr)
            return _UNUSABLE
        except ServerFailed as error:
            print(str(error).splitlines()[-1], file=sys.stderr)
            return _FAILED
        except KeyboardInterrupt:
            return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.cluster",
        description="Runs servers behind a router on this machine until Ctrl-C, and starts again what "
        "ends. MLX_SERVER_* variables are the servers' settings; the cores are divided among them.",
    )
    parser.add_argument("--replicas", type=_positive, default=2, metavar="N", help="default: 2")
    parser.add_argument("--router", choices=ROUTERS, default="smg", help="default: smg")
    parser.add_argument("--port", type=_port, default=8000, help="the router's; default: 8000")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="for stored data and logs, which end otherwise"
    )
    parser.add_argument(
        "--kv-event-model",
        metavar="NAME",
        help="have vllm-router go by what the servers publish of their caches of this model",
    )
    parser.add_argument(
        "options", nargs="*", metavar="OPTION", help="behind --: further flags of the router"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _port(text: str) -> int:
    if (port := _positive(text)) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: they end at {_MAX_PORT}")
    return port


def _signalled() -> threading.Event:
    """Return what the first signal sets; a second one does not wait for requests in flight."""
    ended = threading.Event()

    def end(*_: object) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    return ended


def _fault(settings: Mapping[str, str], router: str) -> str | None:
    """Return what is wrong with the settings of all servers."""
    for name, flag in (("host", "--port"), ("port", "--port"), ("data_dir", "--data")):
        if name in settings:
            return f"MLX_SERVER_{name.upper()} is each server's own; see {flag}"
    if router == "smg" and "api_keys" not in settings and settings.keys() & _OTHER_KEYS:
        return "smg needs one of the servers' keys: set MLX_SERVER_API_KEYS"
    return None


def _cluster(args: argparse.Namespace, settings: Mapping[str, str], folder: Path) -> Cluster:
    folder.mkdir(parents=True, exist_ok=True)
    return Cluster(
        args.replicas,
        folder,
        router=args.router,
        settings=settings,
        kv_event_model=args.kv_event_model,
        options=args.options,
        port=args.port,
    )


def _run(cluster: Cluster, ended: threading.Event) -> None:
    """Start all, say where, and start again what ends, until the event.

    Raises:
        ServerFailed: a process ends before all are ready.
    """
    cluster.start()
    while not cluster.is_ready():
        if ended.wait(_POLL_INTERVAL):
            return
    print(f"{cluster.router.name}: {cluster.url}/v1", flush=True)
    for replica in cluster.replicas:
        print(f"replica {replica.name}: {replica.url} (log: {replica.log})", flush=True)
    while not ended.wait(_SUPERVISION_INTERVAL):
        cluster.supervise(lambda line: print(line, file=sys.stderr, flush=True))
    cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
