"""Tools of servers (MCP): the page offers them, asks before each call, and makes it."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from scripts.server_process import Server
from tests.web.pictures import png
from tests.web.tool_dialog import button, list_server, open_servers
from tests.web.tool_server import SESSION, TOKEN, ToolServer, tool_server
from tests.web.visit import Visit, new_visit, scripted_server


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolServer]:
    with tool_server(picture=base64.b64encode(png(4, 4)).decode()) as server:
        yield server


@pytest.fixture(scope="module")
def permitted(tools: ToolServer) -> Iterator[Server]:
    """A server whose page may call the tools."""
    with scripted_server(mcp_origins=tools.origin) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def visit(chromium: Any, permitted: Server, tools: ToolServer) -> Iterator[Visit]:
    tools.calls.clear()
    tools.methods.clear()
    tools.headers.clear()
    tools.cancelled.clear()
    with new_visit(chromium, permitted.url) as visit:
        visit.expect_problem(f"request to {tools.origin}")
        list_server(visit, tools.url)
        yield visit


def result(visit: Visit) -> Any:
    return visit.page.locator(".message.tool").last


def test_a_call_is_made_once_it_is_allowed(visit: Visit, tools: ToolServer) -> None:
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("[[call echo text=rain]]")
    offered = [tool["function"]["name"] for tool in sent.value.post_data_json["tools"]]
    assert offered == ["echo", "picture", "hang"]
    expect(visit.last.locator(".call pre")).to_contain_text('"text": "rain"')
    assert tools.calls == []
    button(visit, "Allow once").click()
    expect(visit.text).to_have_text("The tool returned: rain")
    assert tools.calls == [{"name": "echo", "arguments": {"text": "rain"}}]
    expect(result(visit).locator("pre")).to_be_hidden()
    result(visit).locator("summary").click()
    expect(result(visit).locator("pre")).to_have_text("rain")
    assert tools.methods[:2] == ["initialize", "notifications/initialized"]
    for headers in tools.headers[1:]:
        assert headers["mcp-session-id"] == SESSION
        assert headers["mcp-protocol-version"] == "2025-11-25"
    # The next one is asked for again, and a reload forgets nothing of that.
    visit.ask("[[call echo text=snow]]")
    visit.page.reload()
    button(visit, "Allow once").click()
    expect(visit.text).to_have_text("The tool returned: snow")


def test_a_call_that_is_denied_is_not_made(visit: Visit, tools: ToolServer) -> None:
    visit.ask("[[call echo text=rain]]")
    button(visit, "Deny").click()
    expect(visit.text).to_have_text("The tool returned: The user has denied this call.")
    assert tools.calls == []


def test_a_tool_that_is_always_allowed_is_called_unasked(visit: Visit, tools: ToolServer) -> None:
    visit.ask("[[call echo text=rain]]")
    button(visit, "Always for this tool").click()
    expect(visit.text).to_have_text("The tool returned: rain")
    visit.send("[[call echo text=snow]]")
    expect(visit.text).to_have_text("The tool returned: snow")
    visit.ask("[[call picture text=x]]")
    expect(button(visit, "Allow once")).to_be_visible()
    assert len(tools.calls) == 2


def test_a_model_that_calls_again_and_again_has_to_say_something(
    visit: Visit, tools: ToolServer
) -> None:
    choices: list[Any] = []

    def respond(route: Any) -> None:
        choices.append(route.request.post_data_json.get("tool_choice"))
        function = {"name": "echo", "arguments": '{"text": "again"}'}
        call = {"index": 0, "id": f"call-{len(choices)}", "function": function}
        delta = {"content": "Enough."} if choices[-1] == "none" else {"tool_calls": [call]}
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, headers={"content-type": "text/event-stream"})

    visit.page.route("**/v1/chat/completions", respond)
    visit.ask("Go on.")
    button(visit, "Always for this tool").click()
    expect(visit.text).to_have_text("Enough.", timeout=30_000)
    assert len(tools.calls) == 10
    assert choices == [None] * 10 + ["none"]


def test_a_hostile_result_stays_a_text(visit: Visit, tools: ToolServer) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    visit.ask(f"[[call echo text={hostile}]]")
    expect(visit.last.locator(".call pre")).to_contain_text("<script>")
    button(visit, "Allow once").click()
    expect(visit.text).to_contain_text("The tool returned")
    assert result(visit).locator("pre").text_content() == hostile
    assert visit.page.locator(".message img, .message script").count() == 0


def test_an_image_is_shown_to_the_user_only(visit: Visit, tools: ToolServer) -> None:
    visit.ask("[[call picture text=x]]")
    button(visit, "Allow once").click()
    expect(visit.text).to_have_text("The tool returned: [image, shown to the user]")
    result(visit).locator("summary").click()
    expect(result(visit).get_by_role("img", name="Image 1 of 1")).to_be_visible()


def test_a_call_is_stopped(visit: Visit, tools: ToolServer) -> None:
    visit.ask("[[call hang text=x]]")
    button(visit, "Allow once").click()
    expect(visit.last.locator(".answer")).to_have_text("Calling …")
    button(visit, "Stop").click()
    assert tools.cancelled.wait(20)
    expect(button(visit, "Allow once")).to_be_visible()
    expect(visit.page.locator(".message")).to_have_count(2)
    button(visit, "Deny").click()
    expect(visit.text).to_have_text("The tool returned: The user has denied this call.")


def test_the_session_ends_with_the_list(visit: Visit, tools: ToolServer) -> None:
    visit.ask("[[say Hi]]")
    tools.closed.clear()
    dialog = open_servers(visit)
    dialog.get_by_role("button", name="Remove this server").click()
    dialog.get_by_role("button", name="Save").click()
    assert tools.closed.wait(20)
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("[[say Hi]]")
    assert "tools" not in sent.value.post_data_json


def test_a_server_without_sessions_is_called(chromium: Any) -> None:
    with (
        tool_server(has_session=False, token=TOKEN) as tools,
        scripted_server(mcp_origins=tools.origin) as server,
        new_visit(chromium, server.url) as visit,
    ):
        visit.expect_problem(f"{tools.origin}|400|401|Failed to load")
        list_server(visit, tools.url, "other")
        visit.ask("[[say Hi]]")
        expect(visit.last).to_contain_text("asks for a token, or does not know this one")
        dialog = open_servers(visit)
        dialog.get_by_label("Token, if it asks for one").fill(TOKEN)
        dialog.get_by_role("button", name="Check").click()
        expect(dialog.get_by_text("3 tools.")).to_be_visible()
        dialog.get_by_role("button", name="Save").click()
        visit.ask("[[call echo text=rain]]")
        button(visit, "Allow once").click()
        expect(visit.text).to_have_text("The tool returned: rain")
        assert "echo" in [headers.get("mcp-name") for headers in tools.headers]
        stored = "[localStorage, sessionStorage].map((s) => s.getItem('mcp-tokens') !== null)"
        assert visit.page.evaluate(stored) == [False, True]


def test_a_server_that_is_down_is_named_and_the_chat_goes_on(chromium: Any) -> None:
    with tool_server() as tools:
        pass
    with (
        scripted_server(mcp_origins=tools.origin) as server,
        new_visit(chromium, server.url) as visit,
    ):
        visit.expect_problem(f"{tools.origin}|ERR_CONNECTION_REFUSED")
        list_server(visit, tools.url)
        visit.ask("[[say Hi]]")
        expect(visit.text).to_have_text("Hi")
        expect(visit.last).to_contain_text(f"{tools.url}: it cannot be reached")


def test_a_server_that_the_policy_leaves_out_is_not_called(
    chromium: Any, server: Server, tools: ToolServer
) -> None:
    with new_visit(chromium, server.url) as visit:
        list_server(visit, tools.url)
        visit.ask("[[say Hi]]")
        expect(visit.last).to_contain_text(f"MLX_SERVER_MCP_ORIGINS={tools.origin}")
