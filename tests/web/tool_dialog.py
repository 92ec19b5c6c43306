"""What a user does with servers of tools: lists them, and allows their calls."""

from typing import Any

from tests.web.visit import Visit


def list_server(visit: Visit, url: str, token: str = "") -> None:
    dialog = open_servers(visit)
    dialog.get_by_role("button", name="Add a server").click()
    dialog.get_by_label("Address of the server").last.fill(url)
    dialog.get_by_label("Token, if it asks for one").last.fill(token)
    dialog.get_by_role("button", name="Save").click()


def open_servers(visit: Visit) -> Any:
    visit.page.get_by_role("button", name="Settings").click()
    dialog = visit.page.get_by_role("dialog", name="Settings")
    if not dialog.get_by_role("button", name="Add a server").is_visible():
        dialog.get_by_text("Tool servers (MCP)").click()
    return dialog


def button(visit: Visit, name: str) -> Any:
    return visit.page.get_by_role("button", name=name, exact=True)
