"""aider, which speaks chat completions and reads edits out of the text."""

from pathlib import Path

import pytest

from scripts.server_process import Server
from tests.agents.aider import command, prepared
from tests.agents.programs import num_aborted, requests_of, wait_for_abort

pytestmark = pytest.mark.agents


def test_an_edit_is_made(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    with requests_of(server) as requests:
        run = place.run(command("--message-file", str(place.home / "message")))
    assert run.returncode == 0, run.stderr
    assert place.notes.read_text() == "the secret word is honey\n"
    assert {request.reason for request in requests} == {"stop"}


def test_a_program_that_is_ended_leaves_nothing_running(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    prepared(tmp_path, server).interrupt(command("--message", "[[count]]"), "", server)
    wait_for_abort(server, before)


def test_a_context_that_is_too_long_is_an_error_for_the_user(
    tmp_path: Path, small_server: Server
) -> None:
    place = prepared(tmp_path, small_server)
    place.notes.write_text(" ".join(map(str, range(4000))))
    run = place.run(command("--message", "[[say Hello.]]"))
    # Its own words: it has recognized the error.
    assert "troubleshooting/token-limits" in run.stdout
