"""Batches over real sockets, with OpenAI's client, and what kills leave."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types import Batch, FileDeleted, FileObject

from scripts.server_process import Server, wait_until
from tests.support.live import live_server
from tests.support.sdk_types import check_shape
from tests.support.small_model import cases

pytestmark = pytest.mark.timeout(240)

MODEL: Final = "small"
NUM_LINES: Final = 40
NUM_TOKENS: Final = 300
WINDOW: Final = "24h"
ENDPOINT: Final = "/v1/chat/completions"
LONG: Final = 120.0


def body(number: int) -> dict[str, Any]:
    """Return one of a few requests, whose answers take so long that a kill comes amid the lines."""
    case = cases()[number % len(cases())]
    return {
        "model": MODEL,
        "messages": case.messages,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }


def line(number: int) -> dict[str, Any]:
    return {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": ENDPOINT,
        "body": body(number),
    }


def write_input(path: Path) -> None:
    rows = [json.dumps(line(number)) for number in range(NUM_LINES)]
    path.write_text("\n".join(rows), encoding="utf-8")


def answers(server: Server) -> list[str]:
    """Return what the requests are answered when each is alone."""
    found = [
        httpx.post(f"{server.url}{ENDPOINT}", json=body(number), timeout=LONG).json()
        for number in range(len(cases()))
    ]
    return [answer["choices"][0]["message"]["content"] for answer in found]


def check_output(text: str, expected: Sequence[str]) -> None:
    """Every line has one result, which is that of its request alone."""
    records = [json.loads(row) for row in text.split("\n") if row]
    assert [record["custom_id"] for record in records] == [f"id-{i}" for i in range(NUM_LINES)]
    for i, record in enumerate(records):
        (choice,) = record["response"]["body"]["choices"]
        assert choice["message"]["content"] == expected[i % len(expected)]


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
    data = str(tmp_path / "data")
    with live_server(data_dir=data) as server, client_of(server) as client:
        expected = answers(server)
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
    with live_server(data_dir=data) as server, client_of(server) as client:
        done = wait_for_end(client, batch.id)
        check_shape(done.to_dict(), Batch)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES, 0)
        assert done.output_file_id is not None
        check_output(client.files.content(done.output_file_id).text, expected)
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert {each.id for each in client.files.list()} == {uploaded.id, done.output_file_id}
        deleted = client.files.delete(uploaded.id)
        check_shape(deleted.to_dict(), FileDeleted)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(uploaded.id)
        assert server.stop() == 0
