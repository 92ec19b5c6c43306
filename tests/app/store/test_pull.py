"""`models pull` and `models rm`, against a hub that stands in."""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from app.commands.parser import main
from app.store.download import download
from app.store.hub import ask
from tests.support.hub import Hub
from tests.support.hub_cache import hub_of, use_cache
from tests.support.local_models import model_files, safetensors

ROOT: Final = Path(__file__).parents[3]
NAME: Final = "org/model"
WEIGHTS: Final = "model.safetensors"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(monkeypatch, tmp_path)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of(monkeypatch) as hub:
        hub.repositories[NAME] = {
            **model_files(),
            WEIGHTS: safetensors(5000),
            "README.md": b"text",
            "modeling.py": b"code",
        }
        yield hub


def pull(name: str = NAME, *flags: str) -> int:
    return main(["models", "pull", name, *flags])


def snapshot(cache: Path, hub: Hub) -> Path:
    return cache / "models--org--model" / "snapshots" / hub.commit(NAME)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Answer(NamedTuple):
    status: int
    out: str
    error: str


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run `models`; standard error is its last line."""
    status = main(["models", *arguments])
    out, error = capsys.readouterr()
    return Answer(status, out, (error.splitlines() or [""])[-1])


def test_a_model_is_downloaded_and_compared_with_the_hub(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull() == 0
    out, error = capsys.readouterr()
    assert error.startswith("pulling org/model: 4 files, 10 KiB, of which 0 bytes are here\n")
    assert out == f"org/model is here, and all 4 files are as on the hub: {snapshot(cache, hub)}\n"
    # Neither text for people nor code.
    assert {path.name for path in snapshot(cache, hub).iterdir()} == set(model_files())
    for name, content in hub.repositories[NAME].items():
        if name in model_files():
            assert (snapshot(cache, hub) / name).read_bytes() == content


def test_what_is_here_is_not_downloaded_again(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull() == 0
    hub.asked.clear()
    capsys.readouterr()
    found = answer(capsys, "pull", NAME, "--json")
    assert (found.status, hub.asked) == (0, [])
    size = sum(map(len, (hub.repositories[NAME][name] for name in model_files())))
    assert json.loads(found.out) == {
        "name": NAME,
        "path": str(snapshot(cache, hub)),
        "size": size,
    }


def test_a_terminal_sees_bars(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[str] = []
    module = sys.modules["huggingface_hub.utils.tqdm"]
    monkeypatch.setattr(module, "disable_progress_bars", lambda: switched.append("off"))
    monkeypatch.setattr("sys.stderr", Terminal())
    assert pull() == 0
    assert switched == []


def test_a_connection_that_breaks_is_resumed_where_it_broke(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut[WEIGHTS] = [4000, 3000]
    assert pull() == 0
    ranges = [asked for name, asked in hub.asked if name == WEIGHTS]
    assert ranges == [None, "bytes=4000-", "bytes=7000-"]
    content = (snapshot(cache, hub) / WEIGHTS).read_bytes()
    assert content == hub.repositories[NAME][WEIGHTS]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are large enough to be resumed."""
    monkeypatch.setattr("app.store.partial_files._LARGE", 1000)


PULL: Final = """
import sys
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1000
from app.commands.parser import main
from app.store import partial_files
partial_files._LARGE = 1000
main(["models", "pull", sys.argv[1]])
"""


def test_a_pull_that_was_killed_goes_on_within_the_file(
    hub: Hub, cache: Path, large: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.stalls[WEIGHTS] = 4000
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(cache)}
    with subprocess.Popen([sys.executable, "-c", PULL, NAME], env=variables) as process:
        assert hub.stalled.wait(60)
        (part,) = (cache / "models--org--model" / "blobs").glob("*.part")
        while part.stat().st_size < 3000:
            assert process.poll() is None
        process.kill()
    arrived = part.stat().st_size
    hub.asked.clear()
    assert pull() == 0
    assert re.search(r", of which [34] KiB are here", capsys.readouterr().err)
    assert hub.asked == [(WEIGHTS, f"bytes={arrived}-")]
    assert (snapshot(cache, hub) / WEIGHTS).read_bytes() == hub.repositories[NAME][WEIGHTS]
    assert not part.exists()


def test_two_pulls_at_once_download_a_file_once(hub: Hub, cache: Path, large: None) -> None:
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(download, [ask(NAME)] * 2))) == 1
    assert [asked for asked in hub.asked if asked[0] == WEIGHTS] == [(WEIGHTS, None)]


def test_a_part_that_is_damaged_is_told_by_its_checksum(
    hub: Hub, cache: Path, large: None, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = cache / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(hub.repositories[NAME][WEIGHTS]).hexdigest()
    (blobs / f"{digest}.part").write_bytes(b"x" * 2000)
    assert answer(capsys, "pull", NAME).error.startswith(f"the checksum of {WEIGHTS} is wrong")
    assert pull() == 0


def test_a_pull_that_failed_goes_on_with_what_is_missing(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cut[WEIGHTS] = [0] * 6
    found = answer(capsys, "pull", NAME)
    assert found.status == 2
    assert found.error.startswith(f"no connection to {hub.url}: ")
    assert not list(cache.rglob("*.incomplete"))
    for _ in range(3):
        # Others may have been on their way.
        hub.asked.clear()
        hub.cut.clear()
        assert pull() == 0
    assert hub.asked == []


def test_a_wrong_checksum_is_told_and_the_file_is_fetched_again(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = hub.repositories[NAME][WEIGHTS]
    hub.altered[WEIGHTS] = content[:-1] + b"x"
    found = answer(capsys, "pull", NAME)
    assert (found.status, found.out) == (2, "")
    assert found.error == (
        f"the checksum of {WEIGHTS} is wrong; what arrived is deleted: run the same command again"
    )
    assert not (snapshot(cache, hub) / WEIGHTS).exists()
    hub.altered.clear()
    hub.asked.clear()
    assert pull() == 0
    assert [name for name, _ in hub.asked] == [WEIGHTS]
    assert (snapshot(cache, hub) / WEIGHTS).read_bytes() == content


def test_a_corrupt_file_in_the_cache_is_found_and_fetched_again(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull() == 0
    (snapshot(cache, hub) / WEIGHTS).resolve().write_bytes(b"corrupt")
    assert answer(capsys, "pull", NAME).error.startswith(f"the checksum of {WEIGHTS} is wrong")
    assert pull() == 0
    content = (snapshot(cache, hub) / WEIGHTS).read_bytes()
    assert content == hub.repositories[NAME][WEIGHTS]


def test_a_disk_without_room_is_told_before_anything_is_downloaded(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(cache.parent)._replace(free=1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert answer(capsys, "pull", NAME) == (
        2,
        "",
        f"1 MiB do not fit on the disk of {cache}, where 1 MiB are free: make room, or set HF_HOME",
    )
    assert (hub.asked, cache.exists()) == ([], False)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "is full; what has arrived is kept, and the same command fetches the rest"),
        (errno.EACCES, "org/model cannot be downloaded: Permission denied"),
    ],
)
def test_a_disk_that_is_full_in_the_middle_leaves_nothing_broken(
    hub: Hub,
    cache: Path,
    number: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def write_half(url: str, file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(number, "Permission denied" if number == errno.EACCES else "No space")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", write_half)
        found = answer(capsys, "pull", NAME)
    assert found.status == 2
    assert reason in found.error
    assert not [path for path in cache.rglob("*") if path.is_file() and path.parent.name == "blobs"]
    assert pull() == 0


@pytest.mark.parametrize(
    ("name", "refusal", "line"),
    [
        (
            "org/gated",
            (403, "GatedRepo"),
            "org/gated is gated: accept its terms at {url}/org/gated, then set HF_TOKEN or run hf auth login",
        ),
        (
            "org/gated",
            (401, "GatedRepo"),
            "org/gated is gated: accept its terms at {url}/org/gated, then set HF_TOKEN or run hf auth login",
        ),
        (
            "org/none",
            None,
            "{url} has no model org/none, or it is private: check the name, or set HF_TOKEN",
        ),
        ("org/denied", (403, ""), "{url} has answered 403: set HF_TOKEN"),
        ("org/broken", (500, ""), "{url} has answered 500: try again later"),
        ("none", None, "none is no id of a model on the hub, which is like owner/name"),
        ("org/a..b", None, "org/a..b: "),
        (
            "org/text",
            None,
            "org/text is no model that mlx-lm reads: it has no config.json with model*.safetensors",
        ),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    name: str,
    refusal: tuple[int, str] | None,
    line: str,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.repositories["org/text"] = {"README.md": b"text"}
    if refusal is not None:
        hub.refusals[name] = refusal
    found = answer(capsys, "pull", name)
    assert (found.status, found.out) == (2, "")
    assert found.error.startswith(line.format(url=hub.url))


def test_without_a_connection_there_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/")
    found = answer(capsys, "pull", NAME)
    assert found.status == 2
    assert found.error.startswith("no connection to http://127.0.0.1:9: ")


def test_offline_nothing_is_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = answer(capsys, "pull", NAME)
    assert found == (2, "", "HF_HUB_OFFLINE is set, so that nothing is downloaded")


def test_an_error_of_the_program_itself_is_no_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("app.store.download.snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        pull()


class TestRemoval:
    def test_a_repository_is_deleted_from_the_cache_and_nothing_else(
        self, hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.repositories["org/other"] = model_files()
        assert pull() == pull("org/other") == 0
        capsys.readouterr()
        found = answer(capsys, "rm", NAME, "--yes", "--json")
        assert found.status == 0
        document = json.loads(found.out)
        assert document["name"] == NAME
        assert document["freed"] >= 10_000
        names = {path.name for path in cache.glob("models--*")}
        assert names == {"models--org--other"}
        text = answer(capsys, "rm", "org/other", "--yes").out
        assert re.fullmatch(r"org/other is deleted: \d+ bytes are free again\n", text)

    def test_what_is_not_in_the_cache_is_not_deleted(
        self, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = answer(capsys, "rm", str(tmp_path), "--yes")
        assert found == (2, "", f"{tmp_path} is not in the hub's cache, {cache}")
        assert tmp_path.exists()

    @pytest.mark.parametrize(
        ("entered", "is_deleted"), [("y\n", True), ("YES\n", True), ("\n", False), ("", False)]
    )
    def test_a_terminal_is_asked(
        self,
        hub: Hub,
        cache: Path,
        entered: str,
        is_deleted: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert pull() == 0
        monkeypatch.setattr("sys.stdin", Terminal(entered))
        capsys.readouterr()
        status = main(["models", "rm", NAME])
        _, error = capsys.readouterr()
        assert error.startswith("delete org/model, 10 KiB, from ")
        assert (status == 0) is is_deleted
        assert snapshot(cache, hub).exists() is not is_deleted
        assert is_deleted or error.endswith("[y/N] nothing is deleted\n")

    def test_without_a_terminal_it_has_to_be_said(
        self, hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert pull() == 0
        capsys.readouterr()
        found = answer(capsys, "rm", NAME)
        assert found.status == 2
        assert found.error.endswith("--yes says so, since no terminal is here to ask at")
        assert snapshot(cache, hub).exists()

    def test_a_folder_that_stays_is_told(
        self,
        hub: Hub,
        cache: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert pull() == 0
        execute = "huggingface_hub.utils._cache_manager.DeleteCacheStrategy.execute"
        monkeypatch.setattr(execute, lambda _: None)
        capsys.readouterr()
        found = answer(capsys, "rm", NAME, "--yes")
        assert found == (2, "", f"{cache / 'models--org--model'} cannot be deleted")
