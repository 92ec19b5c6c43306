"""opencode, which speaks chat completions."""

from pathlib import Path

import pytest

from scripts.server_process import Server
from tests.agents.opencode import RUN, prepared, texts
from tests.agents.programs import (
    SECRET,
    found_all_but_the_end,
    num_aborted,
    requests_of,
    wait_for_abort,
)

pytestmark = pytest.mark.agents


def test_a_tool_is_called_and_the_next_turn_finds_the_first(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    with requests_of(server) as requests:
        first = place.run(RUN, f"[[call read filePath={place.notes}]]")
        second = place.run([*RUN, "--continue"], "[[say That was all.]]")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert SECRET in texts(first.stdout)[-1]
    assert texts(second.stdout) == ["That was all."]
    # One more asks for a title of the session.
    call, result, turn = [request for request in requests if request.num_prompt > 4000]
    assert call.reason == "tool_calls"
    assert found_all_but_the_end(result, call)
    assert found_all_but_the_end(turn, result)


def test_pictures_are_seen(tmp_path: Path, seeing_server: Server) -> None:
    modalities = {"input": ["text", "image"], "output": ["text"]}
    place = prepared(tmp_path, seeing_server, modalities=modalities)
    picture = place.draw(40, "red")
    given = place.run([*RUN, "-f", picture.name, "--", "[[say I see {images}]]"])
    read = place.run(RUN, f"[[call read filePath={picture}]]")
    later = place.run([*RUN, "--continue"], "[[say I see {images}]]")
    assert texts(given.stdout) == ["I see (40x30 #ff0000)"]
    assert texts(read.stdout)[-1].startswith("The tool returned: Image read")
    assert texts(later.stdout) == ["I see (40x30 #ff0000)"]


def test_a_program_that_is_ended_leaves_nothing_running(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    prepared(tmp_path, server).interrupt(RUN, "[[count]]", server)
    wait_for_abort(server, before)


def test_a_context_that_is_too_long_is_an_error_for_the_user(
    tmp_path: Path, small_server: Server
) -> None:
    run = prepared(tmp_path, small_server).run(RUN, "[[say Hello.]]")
    assert "maximum context length is 2048 tokens" in run.stdout + run.stderr
