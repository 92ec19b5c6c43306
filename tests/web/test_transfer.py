"""Prompts as links, conversations as files, a schema of responses, and two models side by side."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from tests.web.pictures import file, png
from tests.web.visit import Visit, new_visit, scripted_server

FIRST: Final = "smollm2-135m-instruct"


def link(shared: Any) -> str:
    text = shared if isinstance(shared, str) else json.dumps(shared)
    return f"#prompt={base64.urlsafe_b64encode(text.encode()).decode().rstrip('=')}"


def prompt(visit: Visit) -> Any:
    return visit.page.get_by_role("textbox", name="Message")


def button(visit: Visit, name: str) -> Any:
    return visit.page.get_by_role("button", name=name, exact=True)


def pick(visit: Visit, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    picked = file("conversations.json", text.encode(), "application/json")
    visit.page.locator("#import-file").set_input_files(picked)


def exported(visit: Visit, name: str) -> Any:
    with visit.page.expect_download() as download:
        button(visit, name).click()
    return json.loads(Path(download.value.path()).read_text(encoding="utf-8"))


def test_a_prompt_is_shared_as_a_link_that_sends_nothing(visit: Visit) -> None:
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.ask("[[say Grüße 🎉]]")
    visit.page.locator(".message.user").hover()
    button(visit, "Copy a link to this prompt").click()
    expect(button(visit, "Copied")).to_be_visible()
    copied = visit.page.evaluate("navigator.clipboard.readText()")
    sent: list[str] = []
    visit.page.on("request", lambda r: sent.append(r.url) if r.method == "POST" else None)
    visit.page.goto(copied)
    expect(prompt(visit)).to_have_value("[[say Grüße 🎉]]")
    expect(visit.page.locator(".message")).to_have_count(0)
    assert visit.page.url.endswith("/#chat")
    assert sent == []
    visit.page.keyboard.press("Enter")
    visit.wait_until_idle()
    expect(visit.text).to_have_text("Grüße 🎉")


def test_a_link_says_what_it_sets_and_changes_no_settings(visit: Visit) -> None:
    shared = {"prompt": "[[say Hi]]", "system": "<b>Be brief.</b>", "params": {"temperature": 0.5}}
    visit.open(link(shared))
    given = visit.page.locator("#given")
    expect(given).to_contain_text("system prompt: “<b>Be brief.</b>”, temperature: 0.5")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.keyboard.press("Enter")
        visit.wait_until_idle()
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "<b>Be brief.</b>"}
    assert body["temperature"] == 0.5
    button(visit, "Use my own settings").click()
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("[[say Hi]]")
    assert "temperature" not in sent.value.post_data_json
    assert sent.value.post_data_json["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    "fragment",
    [
        "#prompt=%%%",
        "#prompt=" + "a" * 40_000,
        link("[]"),
        link({"prompt": 1}),
        link({"prompt": "x", "params": {"tools": 1}}),
        link({"prompt": "x", "params": {"temperature": "0"}}),
        link('{"prompt": "x", "params": {"__proto__": 1}}'),
        link({"prompt": "x", "system": {}}),
    ],
)
def test_a_hostile_link_is_ignored(visit: Visit, fragment: str) -> None:
    visit.open(fragment)
    expect(visit.page.locator("#given")).to_contain_text("The link is ignored")
    expect(prompt(visit)).to_have_value("")


def test_conversations_are_moved_as_a_file(visit: Visit) -> None:
    visit.ask("[[say one]]")
    button(visit, "New conversation").click()
    visit.ask("[[say two]]")
    whole = exported(visit, "Export all")
    assert whole["version"] == 1
    assert [c["title"] for c in whole["conversations"]] == ["[[say two]]", "[[say one]]"]
    visit.page.locator("#conversations li").first.hover()
    one = exported(visit, "Export [[say two]]")
    assert one["conversations"] == whole["conversations"][:1]
    one["conversations"][0]["messages"][0]["images"] = [
        f"data:image/png;base64,{base64.b64encode(png(3, 3)).decode()}"
    ]
    pick(visit, one)
    expect(visit.page.locator("#transfer-news")).to_have_text("1 imported.")
    visit.page.reload()
    expect(visit.page.locator("#conversations li")).to_have_count(3)
    visit.page.locator("#conversations button").first.click()
    expect(visit.page.get_by_role("img", name="Image 1 of 1")).to_be_visible()
    expect(visit.text).to_have_text("two")


def test_more_conversations_than_a_file_takes_are_several(visit: Visit) -> None:
    one = {"title": "x", "messages": [{"role": "user", "content": "x"}]}
    news = visit.page.locator("#transfer-news")
    for number in (1000, 1):
        pick(visit, {"version": 1, "conversations": [one] * number})
        expect(news).to_have_text(f"{number} imported.", timeout=20_000)
    downloads: list[Any] = []
    visit.page.on("download", lambda each: downloads.append(each))
    button(visit, "Export all").click()
    while len(downloads) < 2:
        visit.page.wait_for_event("download")
    files = [json.loads(Path(each.path()).read_text(encoding="utf-8")) for each in downloads]
    assert [len(each["conversations"]) for each in files] == [1000, 1]


def conversation(*messages: Any) -> dict[str, Any]:
    return {"version": 1, "conversations": [{"title": "x", "messages": list(messages)}]}


HOSTILE: Final = {
    "no JSON": "<script>",
    "another version": {"version": 2, "conversations": []},
    "no list": {"version": 1, "conversations": {}},
    "a role": conversation({"role": "system", "content": "x"}),
    "a text": conversation({"role": "user", "content": {"toString": 1}}),
    "an image": conversation({"role": "user", "content": "x", "images": ["https://evil.example"]}),
    "no image": conversation(
        {"role": "user", "content": "x", "images": ["data:image/png;base64,AAAA"]}
    ),
    "a call": conversation({"role": "assistant", "content": "", "calls": [{"id": 1}]}),
    "a rival": conversation({"role": "assistant", "content": "", "rival": {"role": "user"}}),
    "settings": {
        "version": 1,
        "conversations": [{"title": "x", "given": {"params": {"tools": []}}, "messages": []}],
    },
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_as_a_whole(visit: Visit, kind: str) -> None:
    pick(visit, HOSTILE[kind])
    expect(visit.page.locator("#transfer-news")).to_contain_text("Not imported:")
    expect(visit.page.locator("#conversations li")).to_have_count(0)


def test_what_a_file_says_besides_is_not_taken(visit: Visit) -> None:
    call = {"id": "1", "name": "echo", "arguments": "{}", "server": "http://evil.example"}
    html = "<img src=x onerror=alert(1)>"
    message = {"role": "assistant", "content": html, "calls": [call], "isJson": True, "error": html}
    pick(visit, conversation({"role": "user", "content": html}, message))
    visit.page.locator("#conversations button").first.click()
    expect(visit.text).to_have_text(html)
    expect(button(visit, "Return")).to_be_visible()
    expect(button(visit, "Allow once")).to_have_count(0)
    assert visit.page.locator(".message img").count() == 0


def test_responses_follow_a_schema(visit: Visit) -> None:
    page = visit.page
    button(visit, "Settings").click()
    page.get_by_text("Structured output").click()
    field = page.get_by_label("JSON schema of each response")
    field.fill("[1")
    button(visit, "Save").click()
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    assert "not JSON" in field.evaluate("(area) => area.validationMessage")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    field.fill(json.dumps(schema))
    button(visit, "Save").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        visit.ask('[[say {"a":1}]]')
    asked = sent.value.post_data_json["response_format"]
    assert (asked["type"], asked["json_schema"]["schema"]) == ("json_schema", schema)
    expect(visit.text.locator("pre")).to_have_text('{\n  "a": 1\n}')


@pytest.fixture
def two(chromium: Any) -> Iterator[Visit]:
    """A page of a server with two models, which are compared."""
    with scripted_server(models="other=smollm2-135m-instruct") as server:
        with new_visit(chromium, server.url) as visit:
            visit.page.get_by_role("combobox", name="Compare with").select_option("other")
            yield visit


def test_two_models_answer_side_by_side_and_one_goes_on(two: Visit) -> None:
    two.send("[[say one]]")
    columns = two.page.locator(".compared .message")
    expect(columns).to_have_count(2)
    expect(columns.locator("strong")).to_have_text([FIRST, "other"])
    for column in columns.all():
        expect(column.locator(".markdown")).to_have_text("one")
        expect(column.locator(".facts")).to_contain_text("tokens")
    expect(two.page.locator(".streaming")).to_have_count(0)
    two.send("[[say two]]")
    expect(columns).to_have_count(4)
    expect(two.page.locator(".streaming")).to_have_count(0)
    two.page.reload()
    expect(columns).to_have_count(4)
    columns.last.get_by_role("button", name="Continue with this").click()
    expect(columns).to_have_count(0)
    expect(two.page.locator(".message.assistant .facts")).to_have_text([re.compile("· other$")] * 2)


def test_each_of_two_models_is_stopped_on_its_own(two: Visit) -> None:
    two.send("[[count]]")
    columns = two.page.locator(".compared .message")
    for column in columns.all():
        column.locator(".markdown").filter(has_text="0 1 2 3").wait_for()
    button(two, "Stop other").click()
    expect(columns.last.locator(".fault")).to_contain_text("Stopped.")
    expect(two.page.locator(".streaming")).to_have_count(1)
    columns.last.get_by_role("button", name="Continue with this").click()
    expect(two.page.locator(".streaming")).to_have_count(0)
    expect(two.page.locator(".message.assistant")).to_have_count(1)
