"""Batches of the bundled model over real sockets, with OpenAI's client, and what kills leave."""

import json
import os
import signal
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types import Batch, FileDeleted, FileObject

from scripts.server_process import Server, wait_until
from tests.support.golden import GoldenCase
from tests.support.live import BRIEF
from tests.support.sdk_types import check_shape

pytestmark = pytest.mark.timeout(240)

MODEL: Final = "smollm2-135m-instruct"
NUM_LINES: Final = 60
WINDOW: Final = "24h"
ENDPOINT: Final = "/v1/chat/completions"
LONG: Final = 120.0


def line(custom_id: str, case: GoldenCase) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": case.messages,
        "temperature": 0,
        "repetition_penalty": 1,
        "max_tokens": len(case.completion_token_ids),
    }
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def write_input(path: Path, num_lines: int = NUM_LINES) -> None:
    cases = [BRIEF[i % len(BRIEF)] for i in range(num_lines)]
    rows = [json.dumps(line(f"id-{i}", case)) for i, case in enumerate(cases)]
    path.write_text("\n".join(rows), encoding="utf-8")


def check_output(text: str, num_lines: int = NUM_LINES) -> None:
    """Every line has one result, which is the golden one."""
    records = [json.loads(row) for row in text.split("\n") if row]
    assert [record["custom_id"] for record in records] == [f"id-{i}" for i in range(num_lines)]
    for i, record in enumerate(records):
        (choice,) = record["response"]["body"]["choices"]
        assert choice["message"]["content"] == BRIEF[i % len(BRIEF)].text


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wait_for_end(client: openai.OpenAI, batch_id: str) -> Batch:
    def has_ended() -> bool:
        return client.batches.retrieve(batch_id).status not in (
            "validating",
            "in_progress",
            "finalizing",
        )

    wait_until(has_ended, "the batch goes on", LONG)
    return client.batches.retrieve(batch_id)


def test_a_batch_of_openais_client_survives_a_kill(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source)
    settings: dict[str, Any] = {"cpu_precision": "exact", "data_dir": str(tmp_path / "data")}
    with Server(**settings) as server, client_of(server) as client:
        with source.open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
        check_shape(uploaded.to_dict(), FileObject)
        assert client.files.content(uploaded.id).content == source.read_bytes()
        batch = client.batches.create(
            input_file_id=uploaded.id,
            endpoint=ENDPOINT,
            completion_window=WINDOW,
            metadata={"for": "a test"},
        )
        check_shape(batch.to_dict(), Batch)

        def has_some() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed > 3

        wait_until(has_some, "no line is served")
        server.send_signal(signal.SIGKILL)
        server.wait()
    with Server(**settings) as server, client_of(server) as client:
        done = wait_for_end(client, batch.id)
        check_shape(done.to_dict(), Batch)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES, 0)
        assert done.output_file_id is not None
        check_output(client.files.content(done.output_file_id).text)
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert {each.id for each in client.files.list()} == {uploaded.id, done.output_file_id}
        deleted = client.files.delete(uploaded.id)
        check_shape(deleted.to_dict(), FileDeleted)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(uploaded.id)
        assert server.stop() == 0


@pytest.mark.slow
def test_run_batch_survives_a_kill(tmp_path: Path) -> None:
    source, target, work = (tmp_path / name for name in ("in", "out", "out.part"))
    write_input(source)
    command = ["-m", "app", "run-batch", str(source), str(target)]
    with Server(command, cpu_precision="exact") as first:
        # The database grows beyond what an empty one has.
        wal = work.with_name("out.part-wal")
        wait_until(lambda: wal.exists() and wal.stat().st_size > 200_000, f"no result: {first.log}")
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    assert not target.exists()
    with Server(command, cpu_precision="exact") as second:
        assert second.wait() == 0
        assert second.log.splitlines()[-1] == f"{NUM_LINES} of {NUM_LINES} lines, 0 of them failed"
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    check_output(target.read_text(encoding="utf-8"))
