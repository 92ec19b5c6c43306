"""A server that runs one batch in a process of its own, which may kill itself at any point."""

import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, Final

from app.batches import processing
from app.main import create_app
from app.settings import Settings
from app.storage.batches import StoredBatch
from app.storage.files import StoredFile
from app.storage.responses.limits import StoreLimits
from app.storage.storage import Storage, open_folder
from tests.support.speaker import speaking_manager

NUM_LINES: Final = 24
URL: Final = "/v1/completions"
_OBSERVED: Final = (f"{os.sep}app{os.sep}batches{os.sep}", f"{os.sep}app{os.sep}storage{os.sep}")


class Deadfall:
    """Kills the process at an event of the code under test: a call of anything, or a return.

    kill_at: the number of the event; 0 is never.
    """

    def __init__(self, kill_at: int) -> None:
        self.num_events = 0
        self._kill_at = kill_at
        self._is_observed: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if (is_observed := self._is_observed.get(name)) is None:
            is_observed = self._is_observed[name] = any(part in name for part in _OBSERVED)
        if is_observed:
            self.num_events += 1
            if self.num_events == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def set(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)


def lines() -> list[Any]:
    """Return the lines of the batch: most are served, some fail, some are no requests."""
    made = [
        {"custom_id": f"id-{i}", "method": "POST", "url": URL, "body": {"prompt": f"{i}"}}
        for i in range(NUM_LINES)
    ]
    made[3]["body"] = {"prompt": 3}
    made[5]["custom_id"] = "id-4"
    made[7]["method"] = "GET"
    return made


def serve_batch(folder: Path, kill_at: int, report: Path) -> None:
    """Add the batch unless it is there, run it to its end, and write how many events that took."""
    # Else all results would be one transaction.
    processing._GATHERING = 0.0  # type: ignore[misc]
    deadfall = Deadfall(kill_at)
    manager = speaking_manager(b"Hello!")
    deadfall.set()
    with closing(open_folder(folder, StoreLimits(), keeps_responses=False)) as storage:
        try:
            asyncio.run(_serve(storage, Settings.model_construct(), manager))
        finally:
            manager.close()
    report.write_text(str(deadfall.num_events), encoding="ascii")


async def _serve(storage: Storage, settings: Settings, manager: Any) -> None:
    app = create_app(manager, settings, None, storage)
    page = storage.batch.batches.page("", after=None, limit=10)
    if not page.items:
        _add(storage)
    runner = app.state.service.batches
    runner.wake()
    await runner.idle()
    await runner.close()


def _add(storage: Storage) -> None:
    files = storage.batch.files
    draft = files.begin("")
    for line in lines():
        draft.write(json.dumps(line).encode() + b"\n")
    files.add(StoredFile("file-in", "", "batch", "in.jsonl", draft.num_bytes, 0), draft)
    files.discard(draft)
    storage.batch.batches.add(
        StoredBatch(
            id="batch_1",
            owner="",
            endpoint=URL,
            input_file_id="file-in",
            completion_window="24h",
            created=0,
            expires=1 << 40,
        )
    )
