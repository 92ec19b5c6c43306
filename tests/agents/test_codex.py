"""Codex, which speaks Responses."""

from pathlib import Path

import pytest

from scripts.server_process import Server
from tests.agents.codex import EXEC, items, last_message, prepared, usage
from tests.agents.programs import (
    PIXEL,
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
        first = place.run([*EXEC, "-"], "[[call exec_command cmd=cat notes.txt]]")
        second = place.run([*EXEC, "resume", "--last", "-"], "[[say That was all.]]")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    command = next(item for item in items(first.stdout) if item["type"] == "command_execution")
    assert command["aggregated_output"] == f"the secret word is {SECRET}\n"
    assert SECRET in last_message(first.stdout)
    assert last_message(second.stdout) == "That was all."
    call, answer, turn = requests
    assert call.reason == "tool_calls"
    assert found_all_but_the_end(answer, call)
    assert found_all_but_the_end(turn, answer)


def test_a_run_over_a_web_socket_reads_the_instructions_before_the_prompt(
    tmp_path: Path, server: Server
) -> None:
    """Only over a WebSocket the first request asks for no output (`generate: false`)."""
    place = prepared(tmp_path, server, uses_web_socket=True)
    with requests_of(server) as requests:
        run = place.run([*EXEC, "-"], "[[call exec_command cmd=cat notes.txt]]")
    assert run.returncode == 0, run.stderr
    assert SECRET in last_message(run.stdout)
    warmed, call, answer = requests
    assert (warmed.num_output, call.reason, answer.reason) == (0, "tool_calls", "stop")
    assert call.num_cached > 0
    assert found_all_but_the_end(answer, call)


def test_a_second_conversation_finds_the_system_prompt(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    with requests_of(server) as requests:
        for text in ("[[say One.]]", "[[say Two.]]"):
            assert place.run([*EXEC, "-"], text).returncode == 0
    assert requests[1].num_cached >= 0.9 * requests[1].num_prompt


def test_a_call_in_a_namespace_reaches_its_tool(tmp_path: Path, server: Server) -> None:
    call = "[[call multi_agent_v1__spawn_agent message=Say something.]]"
    run = prepared(tmp_path, server).run([*EXEC, "-"], call)
    assert run.returncode == 0, run.stderr
    assert "unsupported call" not in run.stdout
    assert last_message(run.stdout).startswith('The tool returned: {"agent_id"')


def test_an_image_does_not_end_the_conversation(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    image = place.folder / "pixel.png"
    image.write_bytes(PIXEL)
    first = place.run([*EXEC, "-"], f"[[call view_image path={image}]]")
    second = place.run([*EXEC, "resume", "--last", "-"], "[[say That was all.]]")
    assert last_message(first.stdout) == "The tool returned: unsupported call: view_image"
    assert last_message(second.stdout) == "That was all."


def test_a_picture_beside_the_prompt_is_seen(tmp_path: Path, seeing_server: Server) -> None:
    place = prepared(tmp_path, seeing_server, views_images=True)
    used = []
    for width in (40, 140):
        picture = place.draw(width, "red")
        with requests_of(seeing_server) as requests:
            run = place.run([*EXEC, "-i", picture, "--", "[[say I see {images}]]"])
        assert last_message(run.stdout) == f"I see ({width}x30 #ff0000)"
        used.append(usage(run.stdout)["input_tokens"])
        assert used[-1] == sum(request.num_prompt for request in requests)
    # A column is a token.
    assert used[1] - used[0] == 100


def test_a_picture_that_the_model_opens_is_seen_in_all_turns(
    tmp_path: Path, seeing_server: Server
) -> None:
    place = prepared(tmp_path, seeing_server, views_images=True)
    with requests_of(seeing_server) as requests:
        first = place.run([*EXEC, "-"], f"[[call view_image path={place.draw(400, 'blue')}]]")
        second = place.run([*EXEC, "resume", "--last", "-"], "[[say I see {images}]]")
    assert last_message(first.stdout) == "The tool returned: (400x30 #0000ff)"
    assert last_message(second.stdout) == "I see (400x30 #0000ff)"
    call, answer, turn = requests
    assert answer.num_prompt > call.num_prompt + 400
    assert found_all_but_the_end(turn, answer)


def test_a_program_that_is_ended_leaves_nothing_running(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    prepared(tmp_path, server).interrupt([*EXEC, "-"], "[[count]]", server)
    wait_for_abort(server, before)


def test_a_context_that_is_too_long_is_an_error_for_the_user(
    tmp_path: Path, small_server: Server
) -> None:
    run = prepared(tmp_path, small_server).run([*EXEC, "-"], "[[say Hello.]]")
    assert run.returncode != 0
    assert "context window" in run.stdout
