"""The page calls tools of a server that the Model Context Protocol's own SDK makes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from tests.web.tool_dialog import button, list_server
from tests.web.visit import Visit, new_visit, scripted_server

SERVER: Final = Path(__file__).with_name("sdk_tool_server.py")


@pytest.fixture(params=["with sessions", "without"])
def visit(chromium: Any, request: Any) -> Iterator[Visit]:
    command = [sys.executable, str(SERVER)]
    if request.param == "without":
        command.append("--stateless")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        origin = f"http://{urlsplit(url).netloc}"
        with (
            scripted_server(mcp_origins=origin) as server,
            new_visit(chromium, server.url) as visit,
        ):
            visit.expect_problem(f"request to {origin}")
            list_server(visit, url)
            yield visit
    finally:
        process.terminate()
        process.wait()


def test_the_tools_of_an_sdk_are_offered_and_called(visit: Visit) -> None:
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("[[call forecast city=Paris]]")
    forecast, fail = (tool["function"] for tool in sent.value.post_data_json["tools"])
    assert (forecast["name"], fail["name"]) == ("forecast", "fail")
    assert forecast["description"] == "Tell the weather of the next days."
    assert forecast["parameters"]["properties"]["days"]["type"] == "integer"
    button(visit, "Allow once").click()
    expect(visit.text).to_have_text("The tool returned: Paris: rain for 1 days")
    visit.ask("[[call fail]]")
    button(visit, "Allow once").click()
    expect(visit.text).to_contain_text("Error executing tool fail")
