"""The machine room: what the engine does is what the page shows."""

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import expect  # type: ignore[import-not-found]

from tests.web.visit import Visit, new_visit, scripted_server

COUNTS = "[...document.querySelectorAll('#blocks-legend b')].map((b) => Number(b.textContent))"
# From the page, so that they end with it.
SEND_ONE = """(content, priority = "normal") => { fetch("/v1/chat/completions", {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify({ stream: true, priority, messages: [{ role: "user", content }] }),
}); }"""
SEND = f"""(priorities) => priorities.forEach((priority) =>
  ({SEND_ONE})("[[count]] " + "the same prefix ".repeat(100), priority))"""


def test_requests_run_in_lanes_and_wait_in_the_queue(chromium: Any) -> None:
    with scripted_server(max_num_seqs="2") as server:
        with new_visit(chromium, server.url) as visit:
            visit.open("#room")
            expect(visit.page.locator("#no-lanes")).to_be_visible()
            lanes, queue = visit.page.locator("#lanes li"), visit.page.locator("#queue li")
            visit.page.evaluate(SEND, ["normal", "normal"])
            expect(visit.page.locator("#lanes [data-state=decode]")).to_have_count(2)
            visit.page.evaluate(SEND, ["low"])
            expect(queue).to_contain_text(["low"])
            visit.page.evaluate(SEND, ["high"])
            expect(queue).to_contain_text(["high", "low"])
            expect(lanes).to_have_count(4)
            expect(visit.page.locator("#lanes [data-state=waiting]")).to_have_count(2)
            running = visit.page.locator(".tile", has_text="Running")
            expect(running).to_contain_text("2 of 2")
            expect(running).to_contain_text("2 waiting")
            output = visit.page.locator(".tile", has_text="Output").locator(".value")
            expect(output).not_to_have_text("0.0")
            expect(visit.page.locator("#feed-state")).to_be_hidden()


def test_the_map_adds_up_and_says_who_shares_what(chromium: Any) -> None:
    with scripted_server() as server, new_visit(chromium, server.url) as visit:
        visit.open("#room")
        visit.page.evaluate(SEND, ["normal"] * 3)
        expect(visit.page.locator("#lanes [data-state=decode]")).to_have_count(3)
        used, shared, cached, empty = visit.page.evaluate(COUNTS)
        title = visit.page.locator("#blocks-size").inner_text()
        assert used + shared + cached + empty == int(title.split()[0])
        assert used >= 3
        assert shared >= 5
        visit.page.locator("#lanes li").first.hover()
        about = visit.page.locator("#blocks-about")
        expect(about).to_have_text(
            re.compile(r"^Request #\d+ uses \d+ blocks, \d+ of them shared with #\d+, #\d+\.$")
        )
        visit.page.locator("#blocks").hover(position={"x": 3, "y": 3})
        expect(about).to_have_text(re.compile(r"^Block 0: shared by #\d+, #\d+, #\d+\.$"))


def test_a_preempted_request_is_seen_to_wait_again(chromium: Any) -> None:
    # 32 blocks, and each of the three requests would like 16.
    with scripted_server(max_model_len="512") as server, new_visit(chromium, server.url) as visit:
        visit.open("#room")
        for content in ("first [[count]]", "second [[count]]", "third [[count]]"):
            visit.page.evaluate(SEND_ONE, content)
        preempted = visit.page.locator("#lanes [data-state=preempted]")
        expect(preempted).to_have_count(1, timeout=30_000)
        expect(preempted).to_contain_text("preempted 1")
        expect(visit.page.locator("#queue li")).to_contain_text("preempted 1")
        expect(visit.page.locator(".tile", has_text="Running")).to_contain_text("1 preempted")


def test_what_is_kept_on_disk_is_shown(chromium: Any, tmp_path: Path) -> None:
    with scripted_server() as server, new_visit(chromium, server.url) as visit:
        visit.open("#room")
        expect(visit.page.locator("#blocks-size")).to_contain_text("tokens")
        expect(visit.page.locator(".tile", has_text="KV cache on disk")).to_be_hidden()
    with scripted_server(kv_cache_dir=tmp_path) as server, new_visit(chromium, server.url) as visit:
        visit.open("#room")
        tile = visit.page.locator(".tile", has_text="KV cache on disk")
        expect(tile.locator(".value")).to_have_text("0 GiB")
        visit.page.evaluate(SEND_ONE, "[[say Hi]] " + "a word " * 100)
        expect(tile.locator(".value")).not_to_have_text("0 GiB")
        written = tile.locator(".value").inner_text()
        expect(tile).to_contain_text(f"0 tokens hit · 0 GiB read · {written} written")


def test_nothing_is_watched_from_the_chat(visit: Visit) -> None:
    sent: list[str] = []
    visit.page.on("request", lambda request: sent.append(request.url))
    visit.ask("[[say Hi]]")
    assert not [url for url in sent if "/server/events" in url]
    with visit.page.expect_request("**/server/events*") as watching:
        visit.page.get_by_role("link", name="Machine room").click()
    expect(visit.page.locator("#blocks-size")).to_contain_text("tokens")
    with visit.page.expect_event("requestfailed", lambda r: r == watching.value):
        visit.page.get_by_role("link", name="Chat").click()


def test_a_key_of_a_client_is_not_enough(chromium: Any) -> None:
    with scripted_server(api_keys="one", admin_keys="root") as server:
        with new_visit(chromium, server.url) as visit:
            visit.expect_problem("40[13]")
            page = visit.page
            page.get_by_label("API key").fill("one")
            page.get_by_role("button", name="Save").click()
            visit.open("#room")
            expect(page.locator("#feed-state")).to_contain_text("MLX_SERVER_ADMIN_KEYS")
            page.get_by_role("button", name="Settings").click()
            page.get_by_label("API key").fill("root")
            page.get_by_role("button", name="Save").click()
            expect(page.locator("#blocks-size")).to_contain_text("tokens")
            expect(page.locator("#feed-state")).to_be_hidden()


def test_a_lost_server_is_found_again(chromium: Any) -> None:
    with scripted_server() as first, new_visit(chromium, first.url) as visit:
        visit.expect_problem("ERR_")
        visit.open("#room")
        expect(visit.page.locator("#blocks-size")).to_contain_text("tokens")
        first.kill()
        expect(visit.page.locator("#feed-state")).to_contain_text("trying again")
        with scripted_server(port=first.url.rpartition(":")[2]) as second:
            second.address()
            expect(visit.page.locator("#feed-state")).to_be_hidden()
