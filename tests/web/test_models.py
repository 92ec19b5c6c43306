"""Several models: the page shows where each is, waits for one that loads, loads and unloads them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from scripts.server_process import Server
from tests.web.visit import PHONE, Visit, new_visit, scripted_server

FIRST: Final = "smollm2-135m-instruct"
SLOW: Final = "slow"


@dataclass
class Load:
    """How far the load of the slow model is."""

    path: Path

    def is_at(self, text: str) -> None:
        """Say so at once: a part of the text is never read."""
        written = self.path.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(self.path)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    load = Load(tmp_path / "slow")
    load.is_at("0.42")
    return load


@pytest.fixture
def two(load: Load) -> Iterator[Server]:
    """A server with two models, of which the second one is not loaded."""
    with scripted_server(models=f"{SLOW}={load.path}") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.fixture
def visit(chromium: Any, two: Server) -> Iterator[Visit]:
    with new_visit(chromium, two.url) as visit:
        yield visit


def picker(visit: Visit) -> Any:
    return visit.page.get_by_role("combobox", name="Model")


def choose(visit: Visit, model: str, *, of: int = 2) -> None:
    expect(picker(visit).locator("option")).to_have_count(of)
    picker(visit).select_option(model)


def option(visit: Visit, model: str) -> Any:
    return picker(visit).locator(f"option[value={model}]")


def row(visit: Visit, model: str) -> Any:
    return visit.page.locator("#models li", has_text=model)


def button(visit: Visit, name: str) -> Any:
    return visit.page.get_by_role("button", name=name, exact=True)


def test_a_message_waits_for_its_model_and_the_page_says_how_far_it_is(
    visit: Visit, load: Load
) -> None:
    expect(option(visit, FIRST)).to_have_text(f"{FIRST} · loaded · 4.5 GiB")
    expect(option(visit, SLOW)).to_have_text("slow · unloaded")
    choose(visit, SLOW)
    visit.send("[[say Here I am.]]")
    expect(visit.last.locator(".wait")).to_have_text("Loading slow, 42 % …")
    expect(option(visit, SLOW)).to_have_text("slow · loading 42 %")
    expect(visit.page.locator("#model-news")).to_have_text("slow: loading.")
    load.is_at("0.9")
    expect(visit.last.locator(".wait")).to_have_text("Loading slow, 90 % …")
    load.is_at("1")
    expect(visit.text).to_have_text("Here I am.")
    expect(visit.last.locator(".wait")).to_be_hidden()
    expect(visit.last.locator(".facts")).to_contain_text("· slow")
    expect(option(visit, SLOW)).to_contain_text("slow · loaded · 4.5 GiB")
    expect(visit.page.locator("#model-news")).to_have_text("slow: loaded.")
    # The choice is kept.
    visit.page.reload()
    expect(picker(visit)).to_have_value(SLOW)


def test_a_message_can_be_stopped_while_its_model_loads(visit: Visit) -> None:
    choose(visit, SLOW)
    visit.send("[[say never]]")
    expect(visit.last.locator(".wait")).to_have_text("Loading slow, 42 % …")
    visit.page.keyboard.press("Escape")
    expect(visit.fault).to_contain_text("Stopped.")
    expect(visit.last.locator(".wait")).to_be_hidden()
    # No request waits for it any more.
    expect(option(visit, SLOW)).to_have_text("slow · unloaded")
    choose(visit, FIRST)
    visit.ask("[[say next]]")
    expect(visit.text).to_have_text("next")


def test_a_message_waits_for_the_load_of_another_model(chromium: Any, load: Load) -> None:
    settings = {"models": f"{SLOW}={load.path},third=none", "idle_unload": "600"}
    with scripted_server(**settings) as server, new_visit(chromium, server.url) as visit:
        choose(visit, SLOW, of=3)
        visit.open("#room")
        button(visit, "Load slow").click()
        expect(row(visit, SLOW)).to_contain_text("loading")
        visit.page.get_by_role("link", name="Chat").click()
        choose(visit, "third", of=3)
        visit.send("[[say My turn.]]")
        expect(visit.last.locator(".wait")).to_have_text("Waiting for third to be loaded …")
        load.is_at("1")
        expect(visit.text).to_have_text("My turn.")
        visit.wait_until_idle()
        picker(visit).focus()
        expect(option(visit, "third")).to_have_text(
            re.compile(r"^third · loaded · 4\.5 GiB · unloads at \d.* if idle$")
        )


def test_a_load_that_fails_says_why(visit: Visit, load: Load) -> None:
    visit.expect_problem("503|500")
    choose(visit, SLOW)
    visit.send("[[say never]]")
    expect(visit.last.locator(".wait")).to_have_text("Loading slow, 42 % …")
    load.is_at("the disk is <b>broken</b>")
    expect(visit.last).to_have_class(re.compile("^(?!.*streaming)"))
    expect(visit.fault.get_by_role("button", name="Try again")).to_be_visible()
    expect(option(visit, SLOW)).to_have_text("slow · failed")
    visit.open("#room")
    expect(row(visit, SLOW)).to_contain_text("the disk is <b>broken</b>")
    expect(visit.page.locator("#absent")).to_contain_text("slow could not be loaded.")


def test_the_room_loads_a_model_shows_it_and_unloads_it(visit: Visit, load: Load) -> None:
    choose(visit, SLOW)
    visit.open("#room")
    absent, blocks = visit.page.locator("#absent"), visit.page.locator("#blocks")
    expect(absent).to_contain_text("slow is not loaded.")
    expect(blocks).to_be_hidden()
    expect(row(visit, FIRST)).to_contain_text("weights 3 GiB, KV cache 1.5 GiB")
    absent.get_by_role("button", name="Load").press("Enter")
    expect(absent).to_contain_text("slow is being loaded: 42 %.")
    # Where its button was.
    expect(visit.page.locator("#room")).to_be_focused()
    expect(row(visit, SLOW).get_by_role("progressbar", name="Load of slow")).to_be_visible()
    load.is_at("1")
    expect(blocks).to_be_visible()
    expect(visit.page.locator("#blocks-size")).to_contain_text("tokens")
    expect(visit.page.locator("#models-size")).to_have_text("9 GiB in use")
    button(visit, "Unload slow").press("Enter")
    expect(absent).to_contain_text("slow is not loaded.")
    expect(button(visit, "Load slow")).to_be_focused()
    expect(visit.page.locator("#models-size")).to_have_text("4.5 GiB in use")
    # The live view is there again without a reload of the page.
    with visit.page.expect_request("**/server/events?model=slow"):
        button(visit, "Load slow").click()
    expect(visit.page.locator("#feed-state")).to_be_hidden()
    with visit.page.expect_request(f"**/server/events?model={FIRST}"):
        row(visit, FIRST).get_by_role("button", name=FIRST, exact=True).click()
    expect(picker(visit)).to_have_value(FIRST)
    expect(row(visit, FIRST).locator("[aria-current]")).to_have_count(1)


def test_requests_in_flight_are_counted_and_hold_their_model(visit: Visit) -> None:
    visit.count()
    visit.open("#room")
    expect(row(visit, FIRST)).to_contain_text("1 in flight")
    button(visit, f"Unload {FIRST}").click()
    expect(row(visit, FIRST)).to_contain_text("draining")
    visit.page.get_by_role("link", name="Chat").click()
    visit.page.get_by_role("button", name="Stop").click()
    expect(option(visit, FIRST)).to_have_text(f"{FIRST} · unloaded")


def test_only_admins_load_and_unload(chromium: Any, load: Load) -> None:
    keys = {"api_keys": "one", "admin_keys": "root"}
    with scripted_server(models=f"{SLOW}={load.path}", **keys) as server:
        with new_visit(chromium, server.url) as visit:
            visit.expect_problem("40[13]")
            visit.page.get_by_label("API key").fill("one")
            visit.page.get_by_role("button", name="Save").click()
            choose(visit, SLOW)
            visit.open("#room")
            button(visit, "Load slow").click()
            reason = visit.page.locator("#models-refusal")
            expect(reason).to_contain_text("MLX_SERVER_ADMIN_KEYS")
            expect(button(visit, "Load slow")).to_be_disabled()
            expect(button(visit, f"Unload {FIRST}")).to_be_disabled()
            expect(visit.page.locator("#absent-load")).to_be_disabled()
            visit.page.get_by_role("button", name="Settings").click()
            visit.page.get_by_label("API key").fill("root")
            visit.page.get_by_role("button", name="Save").click()
            expect(reason).to_be_hidden()
            button(visit, "Load slow").click()
            expect(row(visit, SLOW)).to_contain_text("loading 42 %")


def test_a_server_that_does_not_tell_states_is_served_too(chromium: Any, two: Server) -> None:
    with new_visit(chromium, two.url) as visit:
        visit.expect_problem("404")
        visit.page.route("**/models/sse", lambda route: route.fulfill(status=404))
        models = {"data": [{"id": FIRST}, {"id": SLOW}]}
        visit.page.route("**/v1/models", lambda route: route.fulfill(json=models))
        visit.page.reload()
        expect(option(visit, FIRST)).to_have_text(FIRST)
        visit.ask("[[say Hi]]")
        expect(visit.text).to_have_text("Hi")
        visit.open("#room")
        expect(visit.page.locator("#blocks-size")).to_contain_text("tokens")
        expect(visit.page.locator("#models-section")).to_be_hidden()


def test_the_states_are_followed_again_after_the_server_was_gone(chromium: Any) -> None:
    with scripted_server() as first, new_visit(chromium, first.url) as visit:
        visit.expect_problem("ERR_")
        expect(picker(visit).locator("option")).to_have_count(1)
        first.kill()
        with scripted_server(port=first.url.rpartition(":")[2], models="other=none") as second:
            second.address()
            # The longest pause between two tries is 10 seconds.
            expect(option(visit, "other")).to_have_text("other · unloaded", timeout=20_000)
            choose(visit, "other")
            visit.ask("[[say Hi]]")
            expect(option(visit, "other")).to_contain_text("loaded")


def test_adapters_are_chosen_like_models(chromium: Any, tmp_path: Path) -> None:
    with scripted_server(adapters=f"pirate={tmp_path / 'pirate'}") as server:
        with new_visit(chromium, server.url) as visit:
            visit.open()
            choose(visit, "pirate")
            expect(option(visit, "pirate")).to_have_text(f"{FIRST} : pirate")
            visit.ask("[[say Ahoy!]]")
            expect(visit.text).to_have_text("Ahoy!")
            visit.open("#room")
            expect(row(visit, FIRST)).to_have_count(1)
            assert visit.unexpected_problems == []
        assert server.stop() == 0
        assert "adapter=pirate" in server.log


def test_a_phone_shows_the_models_by_name(chromium: Any, two: Server, load: Load) -> None:
    load.is_at("a long reason " * 9 + "x" * 90)
    with new_visit(chromium, two.url, viewport=PHONE, has_touch=True) as visit:
        choose(visit, SLOW)
        visit.open("#room")
        button(visit, "Load slow").tap()
        expect(row(visit, SLOW)).to_contain_text("a long reason")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert visit.page.evaluate("document.querySelector('#room').scrollWidth") <= PHONE["width"]
        tree = visit.page.locator("#room").aria_snapshot()
        assert '- button "Load slow"' in tree
        assert f'- button "Unload {FIRST}"' in tree
