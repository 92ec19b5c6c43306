"""Claude Code, which speaks Anthropic's Messages."""

from pathlib import Path

import pytest

from scripts.server_process import Server
from tests.agents.claude_code import RUN, prepared, result
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
        first = place.run(RUN, f"[[call Read file_path={place.notes}]]")
        second = place.run([*RUN, "--continue"], "[[say That was all.]]")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert SECRET in result(first.stdout)["result"]
    assert result(second.stdout)["result"] == "That was all."
    call, answer, turn = requests
    assert call.reason == "tool_calls"
    assert found_all_but_the_end(answer, call)
    assert found_all_but_the_end(turn, answer)


def test_a_second_conversation_finds_the_system_prompt(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    with requests_of(server) as requests:
        for text in ("[[say One.]]", "[[say Two.]]"):
            assert place.run(RUN, text).returncode == 0
    # A system message with the session's data follows the first user turn, which differs.
    assert requests[1].num_cached >= 0.75 * requests[1].num_prompt


def test_a_subagent_answers(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    arguments = "description=short; prompt=Say something.; subagent_type=general-purpose"
    with requests_of(server) as requests:
        run = place.run(RUN, f"[[call Agent {arguments}]]")
    assert run.returncode == 0
    assert "Understood." in run.stdout
    assert len(requests) >= 3


def test_a_tool_that_joins_leaves_the_prefix_alone(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    with requests_of(server) as requests:
        run = place.run(RUN, "[[call ToolSearch query=select:WebFetch; max_results=5]]")
    assert run.returncode == 0
    call, answer = requests
    # The description of the tool that was found.
    assert answer.num_prompt > call.num_prompt + 200
    assert found_all_but_the_end(answer, call)


def test_an_image_does_not_end_the_conversation(tmp_path: Path, server: Server) -> None:
    place = prepared(tmp_path, server)
    image = place.folder / "pixel.png"
    image.write_bytes(PIXEL)
    first = place.run(RUN, f"[[call Read file_path={image}]]")
    second = place.run([*RUN, "--continue"], "[[say That was all.]]")
    assert "this model takes text only" in result(first.stdout)["result"]
    assert result(second.stdout)["result"] == "That was all."


def test_a_picture_that_the_model_reads_is_seen_in_all_turns(
    tmp_path: Path, seeing_server: Server
) -> None:
    place = prepared(tmp_path, seeing_server)
    with requests_of(seeing_server) as requests:
        first = place.run(RUN, f"[[call Read file_path={place.draw(400, 'red')}]]")
        second = place.run([*RUN, "--continue"], "[[say I see {images}]]")
    assert result(first.stdout)["result"] == "The tool returned: (400x30 #ff0000)"
    assert result(second.stdout)["result"] == "I see (400x30 #ff0000)"
    call, answer, turn = requests
    assert answer.num_prompt > call.num_prompt + 400
    assert found_all_but_the_end(turn, answer)
    used = result(second.stdout)["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(used[name] for name in names) == turn.num_prompt


def test_a_picture_in_the_prompt_is_seen(tmp_path: Path, seeing_server: Server) -> None:
    place = prepared(tmp_path, seeing_server)
    run = place.run(RUN, f"@{place.draw(40, 'blue').name} [[say I see {{images}}]]")
    assert result(run.stdout)["result"] == "I see (40x30 #0000ff)"


def test_no_request_is_refused(tmp_path: Path, server: Server) -> None:
    refused = server.log.count("status=4")
    assert prepared(tmp_path, server).run(RUN, "[[say Fine.]]").returncode == 0
    assert server.log.count("status=4") == refused


def test_a_program_that_is_ended_leaves_nothing_running(tmp_path: Path, server: Server) -> None:
    before = num_aborted(server)
    prepared(tmp_path, server).interrupt(RUN, "[[count]]", server)
    wait_for_abort(server, before)


def test_a_context_that_is_too_long_is_an_error_for_the_user(
    tmp_path: Path, small_server: Server
) -> None:
    run = prepared(tmp_path, small_server).run(RUN, "[[say Hello.]]")
    assert result(run.stdout)["is_error"]
    assert "too long" in result(run.stdout)["result"].lower()
