"""Chat: a conversation with a model through the page, over real sockets."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from playwright.sync_api import expect  # type: ignore[import-not-found]

from scripts.server_process import Server
from tests.web.visit import Visit, new_visit, scripted_server

TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def fulfill(visit: Visit, deltas: Sequence[dict[str, Any]]) -> None:
    """Respond in the server's stead, with what the scripted model does not say."""
    chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    body = "".join(f"data: {line}\n\n" for line in lines)
    headers = {"content-type": "text/event-stream"}
    visit.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, headers=headers)
    )


def save_settings(visit: Visit, **values: str) -> None:
    page = visit.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Tools", exact=True).click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Save").click()


def test_a_response_streams_in_and_is_kept(visit: Visit) -> None:
    visit.ask("[[say Hello **world**, from a `model`.]]")
    expect(visit.text.locator("strong")).to_have_text("world")
    expect(visit.text.locator("code")).to_have_text("model")
    expect(visit.last.locator(".facts")).to_have_text(
        re.compile(r"^\d+ tokens · .*prompt \d+.* · smollm2-135m-instruct$")
    )
    visit.page.reload()
    expect(visit.text).to_contain_text("Hello world, from a model.")
    visit.page.get_by_role("button", name="New conversation").click()
    visit.page.reload()
    visit.page.locator("#conversations button").first.click()
    expect(visit.text).to_contain_text("Hello world, from a model.")


def test_what_streams_is_seen_before_it_ends_and_can_be_stopped(visit: Visit) -> None:
    visit.count()
    expect(visit.last).to_have_class(re.compile("streaming"))
    expect(visit.last.locator(".facts")).to_contain_text("tokens/s")
    visit.page.get_by_role("button", name="Stop").click()
    expect(visit.fault).to_contain_text("Stopped.")
    kept = visit.text.inner_text()
    assert kept.startswith("0 1 2 3")
    # The next one does not wait for it.
    visit.ask("[[say next]]")
    expect(visit.text).to_have_text("next")


def test_a_message_is_edited_and_what_followed_is_replaced(visit: Visit) -> None:
    visit.ask("[[say one]]")
    visit.ask("[[say two]]")
    first = visit.page.locator(".message.user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    first.get_by_role("textbox").fill("[[say three]]")
    visit.page.keyboard.press("Enter")
    visit.wait_until_idle()
    expect(visit.page.locator(".message")).to_have_count(2)
    expect(visit.text).to_have_text("three")


def test_a_response_is_regenerated(visit: Visit) -> None:
    visit.ask("[[say one]]")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.last.get_by_role("button", name="Regenerate").click()
    visit.wait_until_idle()
    assert [turn["role"] for turn in sent.value.post_data_json["messages"]] == ["user"]
    expect(visit.page.locator(".message")).to_have_count(2)
    expect(visit.text).to_have_text("one")


def test_an_earlier_response_is_replaced_only_if_confirmed(visit: Visit) -> None:
    visit.ask("[[say one]]")
    visit.ask("[[say two]]")
    again = visit.page.get_by_role("button", name="Regenerate").first
    visit.page.once("dialog", lambda dialog: dialog.dismiss())
    again.click()
    expect(visit.page.locator(".message")).to_have_count(4)
    visit.page.once("dialog", lambda dialog: dialog.accept())
    again.click()
    visit.wait_until_idle()
    expect(visit.page.locator(".message")).to_have_count(2)


def test_what_is_continued_is_the_only_one_that_streams(visit: Visit) -> None:
    visit.count()
    visit.page.keyboard.press("Escape")
    visit.send("again [[count]]")
    expect(visit.page.locator(".streaming")).to_have_count(1)
    visit.page.get_by_role("button", name="Continue").first.click()
    expect(visit.page.locator(".streaming")).to_have_count(1)
    visit.page.get_by_role("button", name="Stop").click()
    expect(visit.page.locator(".streaming")).to_have_count(0)


def test_code_is_copied(visit: Visit) -> None:
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.ask("[[say ```python\nprint('a < b')\n```]]")
    block = visit.text.locator(".code-block")
    expect(block.locator(".code-head")).to_contain_text("python")
    block.get_by_role("button", name="Copy the code").click()
    expect(block.get_by_role("button", name="Copied")).to_be_visible()
    assert visit.page.evaluate("navigator.clipboard.readText()") == "print('a < b')"


def test_reasoning_is_folded(visit: Visit) -> None:
    fulfill(
        visit, [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "42"}]
    )
    visit.ask("What is it?")
    expect(visit.text).to_have_text("42")
    reasoning = visit.last.locator("details.reasoning")
    expect(reasoning.locator("div")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator("div")).to_have_text("Let me see.")


def test_a_tool_is_called_and_its_result_returned(visit: Visit) -> None:
    save_settings(visit, Definitions=json.dumps([TOOL]))
    visit.ask("[[call get_weather city=Paris]]")
    expect(visit.last.locator(".call summary")).to_have_text("Calls get_weather")
    expect(visit.last.locator(".call pre")).to_contain_text('"city": "Paris"')
    visit.last.get_by_role("textbox", name="Result of get_weather").fill("rain")
    visit.last.get_by_role("button", name="Return").click()
    expect(visit.page.locator(".message")).to_have_count(4)
    visit.wait_until_idle()
    expect(visit.text).to_have_text("The tool returned: rain")


def test_a_call_that_was_passed_over_takes_no_result(visit: Visit) -> None:
    save_settings(visit, Definitions=json.dumps([TOOL]))
    visit.ask("[[call get_weather city=Paris]]")
    result = visit.page.get_by_role("textbox", name="Result of get_weather")
    expect(result).to_have_count(1)
    visit.ask("[[say never mind]]")
    expect(result).to_have_count(0)


def test_formulas_are_shown_as_they_are_written(visit: Visit) -> None:
    formulas = (r"\(a*b*c\)", r"$x^{*}_1 y^{*}_2$", r"\[ a \\ \{b\} \]", r"$$\sum *x_i*$$")
    visit.ask(f"[[say {'; '.join(formulas)}; costs $5 *or* $6]]")
    expect(visit.text).to_have_text(f"{'; '.join(formulas)}; costs $5 or $6")


def test_only_what_is_set_is_sent(visit: Visit) -> None:
    save_settings(visit, Temperature="0.5", System_prompt="Be brief.")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("[[say yes]]")
    body = sent.value.post_data_json
    assert body.keys() == {
        *("model", "messages", "stream", "stream_options", "return_timings", "temperature")
    }
    assert body["temperature"] == 0.5
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    visit.page.reload()
    visit.page.get_by_role("button", name="Settings").click()
    expect(visit.page.get_by_label("Temperature")).to_have_value("0.5")


def test_one_conversation_streams_while_another_is_shown(visit: Visit) -> None:
    visit.count()
    visit.page.get_by_role("button", name="New conversation").click()
    visit.ask("[[say Hi]]")
    expect(visit.text).to_have_text("Hi")
    first = visit.page.locator("#conversations").get_by_role("button", name="[[count]]", exact=True)
    first.click()
    visit.wait_for_text("20 21 22")
    expect(visit.page.locator(".message")).to_have_count(2)
    visit.page.get_by_role("button", name="Stop").click()
    visit.page.on("dialog", lambda dialog: dialog.accept())
    visit.page.get_by_role("button", name="Delete [[count]]").click()
    expect(visit.page.locator("#conversations li")).to_have_count(1)
    visit.page.reload()
    expect(visit.page.locator("#conversations li")).to_have_count(1)


def test_a_key_is_asked_for_and_kept_only_if_told(chromium: Any) -> None:
    with scripted_server(api_keys="marmalade") as server:
        with new_visit(chromium, server.url) as visit:
            visit.expect_problem("401")
            dialog = visit.page.get_by_role("dialog", name="Settings")
            expect(dialog.get_by_role("alert")).to_contain_text("a valid API key is required")
            dialog.get_by_label("API key").fill("marmalade")
            dialog.get_by_role("button", name="Save").click()
            visit.ask("[[say let in]]")
            expect(visit.text).to_have_text("let in")
            stored = "[localStorage, sessionStorage].map((s) => s.getItem('api-key'))"
            assert visit.page.evaluate(stored) == [None, "marmalade"]


def test_a_lost_connection_keeps_what_came_and_can_go_on(chromium: Any) -> None:
    with scripted_server() as first, new_visit(chromium, first.url) as visit:
        visit.expect_problem("ERR_")
        visit.count()
        first.kill()
        expect(visit.fault).to_contain_text("The connection was lost.")
        kept = visit.text.inner_text()
        assert kept.startswith("0 1 2 3")
        # There is still no server.
        visit.fault.get_by_role("button", name="Continue").click()
        expect(visit.fault).to_contain_text("The server cannot be reached.")
        assert visit.text.inner_text() == kept
        with again(first) as second:
            second.address()
            with visit.page.expect_request("**/v1/chat/completions") as sent:
                visit.fault.get_by_role("button", name="Continue").click()
            body = sent.value.post_data_json
            assert body["continue_final_message"] is True
            assert body["messages"][-1]["role"] == "assistant"
            expect(visit.last).to_have_class(re.compile("streaming"))
            visit.page.get_by_role("button", name="Stop").click()
            assert visit.text.inner_text().startswith(kept)


def again(server: Server) -> Server:
    """Start a server where another one was."""
    return scripted_server(port=server.url.rpartition(":")[2])


def test_an_error_of_the_server_is_shown(visit: Visit) -> None:
    visit.expect_problem("400")
    save_settings(visit, Most_tokens="999999")
    visit.ask("[[say yes]]")
    expect(visit.fault).to_contain_text(re.compile("context|tokens"))
    expect(visit.fault.get_by_role("button", name="Try again")).to_be_visible()
    expect(visit.fault.get_by_role("button", name="Continue")).to_have_count(0)


def test_another_model_since_the_page_was_opened_is_found(visit: Visit) -> None:
    visit.expect_problem("404|ERR_FAILED")
    # Set in the next page: a late list would let this one choose a model after it.
    visit.page.add_init_script("localStorage.setItem('settings', '{\"model\": \"of before\"}')")
    # It would say so at once.
    visit.page.route("**/models/sse", lambda route: route.abort())
    # The list comes only once the message is sent.
    asked: list[str] = []
    visit.page.route("**/v1/models", lambda r: r.continue_() if asked else r.abort())
    visit.page.on("request", lambda r: asked.append(r.url) if r.method == "POST" else None)
    visit.page.reload()
    visit.ask("[[say Hi]]")
    expect(visit.fault).to_contain_text("The model 'of before' does not exist here.")
    expect(visit.page.get_by_role("combobox", name="Model")).to_have_value("smollm2-135m-instruct")
    visit.fault.get_by_role("button", name="Try again").click()
    expect(visit.text).to_have_text("Hi")


def test_tabs_show_the_same(visit: Visit) -> None:
    visit.ask("[[say one]]")
    with new_tab(visit) as other:
        other.page.locator("#conversations button").first.click()
        visit.ask("[[say two]]")
        expect(other.text).to_have_text("two")
        other.ask("[[say three]]")
        expect(visit.text).to_have_text("three")
        expect(visit.page.locator(".message")).to_have_count(6)
        other.page.on("dialog", lambda dialog: dialog.accept())
        other.page.get_by_role("button", name="Delete [[say one]]").click()
        expect(visit.page.locator("#conversations li")).to_have_count(0)
        expect(visit.page.locator(".message")).to_have_count(0)


@contextmanager
def new_tab(visit: Visit) -> Iterator[Visit]:
    page = visit.page.context.new_page()
    other = Visit(page, visit.url)
    other.open()
    yield other
    page.close()


def test_what_the_browser_does_not_keep_lasts_as_long_as_the_page(visit: Visit) -> None:
    blocked = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
      Object.defineProperty(window, name, { get() { throw new DOMException("", "SecurityError"); } });
    }"""
    visit.page.add_init_script(blocked)
    visit.page.reload()
    expect(visit.page.locator("#kept")).to_contain_text("Not kept")
    visit.page.get_by_role("button", name="Theme").click()
    expect(visit.page.get_by_role("button", name="Theme: light")).to_be_visible()
    save_settings(visit, Temperature="0.5")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("[[say Hi]]")
    assert sent.value.post_data_json["temperature"] == 0.5
    expect(visit.text).to_have_text("Hi")


def test_a_conversation_for_which_there_is_no_room_is_not_said_to_be_kept(visit: Visit) -> None:
    devtools = visit.page.context.new_cdp_session(visit.page)
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": visit.url, "quotaSize": 100})
    visit.ask("[[say Hi]]")
    expect(visit.page.locator("#kept")).to_contain_text("Not kept")
