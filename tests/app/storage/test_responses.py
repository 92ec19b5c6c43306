"""Stored responses: whose they are, how many, for how long, and where."""

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.storage.responses.limits import StoreLimits
from app.storage.responses.store import ResponseStore, StoredResponse
from app.storage.storage import Storage
from tests.support.fakes import FakeClock
from tests.support.rows import rows


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture(params=["memory", "folder"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock
) -> Iterator[ResponseStore]:
    folder = tmp_path if request.param == "folder" else None
    with closing(ResponseStore(StoreLimits(3, 60), folder, clock)) as made:
        yield made


def response(body: str = "{}", **output: str) -> StoredResponse:
    return StoredResponse(body, "[]", True, output)


def test_a_response_is_its_owners(store: ResponseStore) -> None:
    store.put("me", "r", response("mine", item="text"))
    assert store.get("me", "r") == StoredResponse("mine", "[]", True)
    assert store.item("me", "item") == "text"
    for other in ("", "you"):
        assert store.get(other, "r") is None
        assert store.item(other, "item") is None
        store.delete(other, "r")
    assert store.get("me", "r") is not None
    assert store.get("me", "other") is None


def test_a_response_is_replaced_and_keeps_its_input_and_its_age(
    store: ResponseStore, clock: FakeClock
) -> None:
    store.put("me", "r", StoredResponse("begun", "[1]", False))
    assert store.get("me", "r") == StoredResponse("begun", "[1]", False)
    clock.now += 50
    store.put("me", "r", response("done", item="text"))
    assert store.get("me", "r") == StoredResponse("done", "[1]", True)
    assert store.item("me", "item") == "text"
    clock.now += 11
    assert store.get("me", "r") is None


def test_a_deleted_response_is_gone_with_its_items(store: ResponseStore) -> None:
    store.put("me", "r", response(item="text"))
    for _ in range(2):
        store.delete("me", "r")
    assert store.get("me", "r") is None
    assert store.item("me", "item") is None


def test_the_oldest_of_an_owner_are_dropped(store: ResponseStore) -> None:
    store.put("you", "yours", response())
    for number in range(5):
        store.put("me", f"r{number}", response())
    kept = [n for n in range(5) if store.get("me", f"r{n}") is not None]
    assert kept == [2, 3, 4]
    assert store.get("you", "yours") is not None


@rows("part", ["body", "input", "output"])
def test_the_oldest_are_dropped_when_the_bytes_of_an_owner_are_too_many(part: str) -> None:
    parts: dict[str, Any] = {"body": "", "input": ""}
    parts[part] = {"item": "x" * 40} if part == "output" else "\u00e9" * 20
    large, small = StoredResponse(is_finished=True, **parts), StoredResponse("", "", True)
    with closing(ResponseStore(StoreLimits(max_bytes=100))) as store:
        store.put("you", "yours", large)
        for name in ("a", "b", "c"):
            store.put("me", name, large)
        store.put("me", "d", small)
        assert [n for n in "abcd" if store.get("me", n) is not None] == ["b", "c", "d"]
        assert store.get("you", "yours") is not None


def test_a_response_that_grows_drops_others_and_the_newest_always_stays() -> None:
    with closing(ResponseStore(StoreLimits(max_bytes=10))) as store:
        store.put("me", "old", StoredResponse("1234", "", True))
        store.put("me", "new", StoredResponse("1234", "", False))
        assert store.get("me", "old") is not None
        store.put("me", "new", StoredResponse("x" * 100, "", True))
        assert store.get("me", "old") is None
        assert store.get("me", "new") is not None


def seeing(*images: str, body: str = "") -> StoredResponse:
    """Return a response to images, whose names stand for their digests."""
    return StoredResponse(body, "", True, images={image: f"data:{image}" for image in images})


def kept_images(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "responses.sqlite")) as other:
        return sorted(url for (url,) in other.execute("SELECT url FROM images"))


def test_an_image_is_there_once_for_each_owner_as_long_as_a_response_has_it(tmp_path: Path) -> None:
    with closing(ResponseStore(folder=tmp_path)) as store:
        for name, images in {"r": "a", "s": "ab", "t": "abb"}.items():
            store.put("me", name, seeing(*images))
        store.put("you", "yours", seeing("a"))
        assert store.get("me", "s") == seeing("a", "b")
        assert kept_images(tmp_path) == ["data:a", "data:a", "data:b"]
        store.delete("me", "s")
        store.put("me", "t", response("done"))
        assert store.get("me", "t") == StoredResponse(
            "done", "", True, images=seeing("a", "b").images
        )
        store.delete("me", "t")
        assert kept_images(tmp_path) == ["data:a", "data:a"]
        store.delete("me", "r")
        assert kept_images(tmp_path) == ["data:a"]
        assert store.get("you", "yours") == seeing("a")


def test_an_image_that_is_shared_counts_once(tmp_path: Path) -> None:
    large, other = "a" * 35, "b" * 35
    with closing(ResponseStore(StoreLimits(max_bytes=100), tmp_path)) as store:

        def kept() -> str:
            return "".join(n for n in "rstuvwxyz" if store.get("me", n) is not None)

        # 40 bytes of the image, and 10 of each.
        for name in "rstuvw":
            store.put("me", name, seeing(large, body=10 * name))
        assert kept() == "rstuvw"
        store.put("me", "x", seeing(large, body=10 * "x"))
        assert kept() == "stuvwx"
        # The new one has another one, and its image is not with any other.
        store.put("me", "y", seeing(other, body=10 * "y"))
        assert kept() == "xy"
        store.put("me", "z", seeing(other, body=10 * "z"))
        assert kept() == "yz"
        assert kept_images(tmp_path) == [f"data:{other}"]


def test_images_are_gone_with_the_time_of_their_responses(tmp_path: Path, clock: FakeClock) -> None:
    with closing(ResponseStore(StoreLimits(max_age=60), tmp_path, clock)) as store:
        store.put("me", "old", seeing("a", "b"))
        clock.now += 61
        store.put("me", "new", seeing("b"))
        assert kept_images(tmp_path) == ["data:b"]


def test_a_response_is_gone_after_its_time(store: ResponseStore, clock: FakeClock) -> None:
    store.put("me", "old", response(item="text"))
    clock.now += 60
    assert store.get("me", "old") is not None
    clock.now += 1
    assert store.get("me", "old") is None
    assert store.item("me", "item") is None
    store.put("me", "new", response())
    clock.now -= 1
    assert store.get("me", "old") is None, "it was dropped with the next one"


def test_what_is_in_a_folder_outlives_the_store_and_is_private(tmp_path: Path) -> None:
    with closing(ResponseStore(folder=tmp_path)) as store:
        store.put("me", "r", response("mine"))
        modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}
    with closing(ResponseStore(folder=tmp_path)) as again:
        assert again.get("me", "r") == StoredResponse("mine", "[]", True)


def test_a_database_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with closing(ResponseStore(folder=tmp_path)) as store:
        with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as other:
            other.execute("DROP TABLE items")
        with pytest.raises(OSError, match=r"/responses\.sqlite: no such table: items$"):
            store.put("me", "r", response(item="text"))
        assert store.get("me", "r") is None


def test_what_another_version_stored_is_dropped(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as other:
        other.execute("CREATE TABLE responses (id TEXT PRIMARY KEY)")
    with closing(ResponseStore(folder=tmp_path)) as store:
        store.put("me", "r", response())
        assert store.get("me", "r") is not None


def test_by_default_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Storage()) as storage:
        storage.responses.put("me", "r", response())
    assert list(tmp_path.iterdir()) == []
