"""The page by keyboard, on a phone, read aloud, in both themes."""

from typing import Any

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from scripts.server_process import Server
from tests.web.visit import NAMELESS, PHONE, Visit, new_visit


def focused(visit: Visit) -> str:
    """Return the name of what has the focus."""
    name: str = visit.page.evaluate(
        "(document.activeElement.getAttribute('aria-label') || document.activeElement.id"
        " || document.activeElement.textContent).trim()"
    )
    return name


def test_all_can_be_done_by_keyboard(visit: Visit) -> None:
    keyboard = visit.page.keyboard
    assert focused(visit) == "prompt"
    keyboard.type("[[say one")
    keyboard.press("Shift+Enter")
    keyboard.type("two]]")
    expect(visit.page.locator(".message")).to_have_count(0)
    keyboard.press("Enter")
    visit.wait_until_idle()
    expect(visit.page.locator(".bubble")).to_have_text("[[say one\ntwo]]")
    expect(visit.text.locator("br")).to_have_count(1)
    assert focused(visit) == "prompt"
    keyboard.type("[[count]]")
    keyboard.press("Enter")
    visit.wait_for_text("0 1 2 3")
    keyboard.press("Escape")
    expect(visit.fault).to_contain_text("Stopped.")
    for name in ("Add images or files", "Regenerate", "Copy", "Try again", "Continue"):
        keyboard.press("Shift+Tab")
        assert focused(visit) == name


def test_the_order_of_focus_is_that_of_the_page(visit: Visit) -> None:
    visit.page.locator(".skip").focus()
    order = [focused(visit)]
    for _ in range(9):
        visit.page.keyboard.press("Tab")
        order.append(focused(visit))
        outline = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", order
    assert order == [
        "Skip to the message field",
        *("to-chat", "to-room", "model", "Theme: as the system", "Settings", "new-chat"),
        *("export", "import"),
        "Messages",
    ]


def test_the_dialog_keeps_the_focus_and_gives_it_back(visit: Visit) -> None:
    opener = visit.page.get_by_role("button", name="Settings")
    opener.focus()
    visit.page.keyboard.press("Enter")
    expect(visit.page.get_by_role("dialog", name="Settings")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.page.get_by_role("dialog")).to_have_count(0)
    assert focused(visit) == "Settings"


def test_a_button_does_by_keyboard_what_it_says(visit: Visit) -> None:
    visit.ask("[[say one]]")
    visit.ask("[[say two]]")
    visit.page.locator(".message.user").first.get_by_role("button", name="Edit").focus()
    visit.page.keyboard.press("Enter")
    visit.page.keyboard.press("Tab")
    assert focused(visit) == "Cancel"
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator(".edit")).to_have_count(0)
    expect(visit.page.locator(".message")).to_have_count(4)
    assert focused(visit) == "Edit"


def test_the_focus_is_not_lost_with_what_had_it(visit: Visit) -> None:
    visit.ask("[[say one]]")
    visit.last.get_by_role("button", name="Regenerate").focus()
    visit.page.keyboard.press("Enter")
    visit.wait_until_idle()
    expect(visit.page.locator("#prompt")).to_be_focused()
    visit.page.get_by_role("button", name="New conversation").click()
    visit.page.on("dialog", lambda dialog: dialog.accept())
    visit.page.get_by_role("button", name="Delete [[say one]]").focus()
    visit.page.keyboard.press("Enter")
    expect(visit.page.get_by_role("button", name="New conversation")).to_be_focused()


def test_copying_leaves_the_focus_where_it_was(visit: Visit) -> None:
    visit.ask("[[say one]]")
    visit.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    visit.last.get_by_role("button", name="Copy").focus()
    visit.page.keyboard.press("Enter")
    expect(visit.last.get_by_role("button", name="Copied")).to_be_focused()


def test_a_folded_field_says_what_is_wrong_with_it(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Settings").click()
    tools, summary = (
        visit.page.get_by_label("Definitions"),
        visit.page.get_by_text("Tools", exact=True),
    )
    summary.click()
    tools.fill("nothing")
    summary.click()
    expect(tools).to_be_hidden()
    visit.page.get_by_role("button", name="Save").click()
    expect(tools).to_be_focused()


def test_a_screen_reader_finds_landmarks_and_names(visit: Visit) -> None:
    visit.ask("[[say # Title\n\n| a |\n| --- |\n| b |\n\n```x\ncode\n```]]")
    tree = visit.page.locator("body").aria_snapshot()
    for landmark in (
        "banner",
        'navigation "Views"',
        'complementary "Conversations"',
        'main "Chat"',
    ):
        assert f"- {landmark}" in tree
    assert tree.count("- main") == 1
    assert NAMELESS.findall(tree) == []
    visit.page.get_by_role("button", name="Settings").click()
    dialog = visit.page.get_by_role("dialog", name="Settings").aria_snapshot()
    assert NAMELESS.findall(dialog) == []
    assert dialog.count("- spinbutton ") == 7
    visit.open("#room")
    room = visit.page.locator("body").aria_snapshot()
    assert '- main "Machine room"' in room
    assert NAMELESS.findall(room) == []


def test_what_streams_is_read_aloud_in_sentences(visit: Visit) -> None:
    record = """() => {
      window.said = [];
      const status = document.getElementById("announcer");
      new MutationObserver(() => window.said.push(status.textContent))
        .observe(status, { childList: true, characterData: true, subtree: true });
    }"""
    visit.page.evaluate(record)
    visit.ask("[[say One thing. Another thing.]]")
    said = visit.page.evaluate("window.said")
    assert said[0] == "The model responds."
    assert said[-1].endswith("Another thing. The response is complete.")
    assert len(said) <= 4
    assert visit.page.locator("#announcer").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("fragment", ["", "#room"])
def test_a_phone_shows_all_without_scrolling_sideways(
    chromium: Any, server: Server, fragment: str
) -> None:
    with new_visit(chromium, server.url, viewport=PHONE, has_touch=True) as visit:
        if not fragment:
            code = "x" * 200
            visit.ask(
                f"[[say | {' | '.join('abcdefghij' * 2)} |\n|{'---|' * 20}\n\n```\n{code}\n```]]"
            )
        visit.open(fragment)
        wide = visit.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"]
        expect(visit.page.get_by_role("heading", name="mlx-batch-server", level=1)).to_have_count(1)
        for name in ("Settings", "Theme: as the system"):
            box = visit.page.get_by_role("button", name=name).bounding_box()
            assert box["x"] + box["width"] <= PHONE["width"]
            assert min(box["width"], box["height"]) >= 32


def test_on_a_phone_conversations_are_in_a_drawer(chromium: Any, server: Server) -> None:
    with new_visit(chromium, server.url, viewport=PHONE, has_touch=True) as visit:
        visit.ask("[[say Hi]]")
        new = visit.page.get_by_role("button", name="New conversation")
        expect(new).to_be_hidden()
        visit.page.get_by_role("button", name="Conversations").tap()
        expect(new).to_be_visible()
        visit.page.keyboard.press("Escape")
        expect(new).to_be_hidden()
        visit.page.get_by_role("button", name="Conversations").tap()
        new.tap()
        expect(visit.page.locator(".message")).to_have_count(0)
        expect(new).to_be_hidden()


def background(visit: Visit) -> str:
    color: str = visit.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return color


def test_the_theme_is_the_systems_until_one_is_chosen(chromium: Any, server: Server) -> None:
    with new_visit(chromium, server.url, color_scheme="dark") as visit:
        dark = background(visit)
        visit.page.get_by_role("button", name="Theme").click()
        light = background(visit)
        assert light != dark
        visit.page.reload()
        assert background(visit) == light
        expect(visit.page.get_by_role("button", name="Theme: light")).to_be_visible()


def test_nothing_moves_where_that_is_not_wanted(chromium: Any, server: Server) -> None:
    with new_visit(chromium, server.url, reduced_motion="reduce") as visit:
        visit.count()
        running = visit.page.evaluate("document.getAnimations().length")
        visit.page.get_by_role("button", name="Stop").click()
    assert running == 0
