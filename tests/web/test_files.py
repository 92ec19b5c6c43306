"""Files on the page: texts and PDFs, how they are added, shown, sent and kept, and what the model reads of them."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from scripts.server_process import Server
from tests.support.pdfs import pdf
from tests.web.pictures import file, png
from tests.web.visit import NAMELESS, PHONE, Visit, new_visit

COMPLETIONS: Final = "**/v1/chat/completions"
NEITHER: Final = "neither an image nor a PDF nor a text in UTF-8"


class Reading(Visit):
    """A visit by a user who has files; `bodies` are the requests that the server got."""

    def __init__(self, visit: Visit) -> None:
        super().__init__(visit.page, visit.url, visit.problems)
        self.bodies: list[dict[str, Any]] = []
        self.page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if request.method == "POST":
            self.bodies.append(request.post_data_json)

    @property
    def chips(self) -> Any:
        """The files that are not sent yet."""
        return self.page.locator("#attached .file")

    @property
    def news(self) -> Any:
        return self.page.locator("#attached-news")

    @property
    def sent(self) -> Any:
        """The files of messages."""
        return self.page.locator(".message.user .file")

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def pick(self, *files: dict[str, Any]) -> None:
        with self.page.expect_file_chooser() as chooser:
            self.button("Add images or files").click()
        chooser.value.set_files(files)

    def give(self, script: str) -> None:
        """Let the page get files that no file system has: `script` makes a list of them."""
        self.page.evaluate(
            f"""() => {{
              const clipboardData = new DataTransfer();
              for (const file of {script}) clipboardData.items.add(file);
              const event = new ClipboardEvent("paste", {{ clipboardData, bubbles: true, cancelable: true }});
              document.activeElement.dispatchEvent(event);
            }}"""
        )

    def sent_files(self, turn: int = 0) -> list[tuple[str, bytes]]:
        """Return the names and the contents of the files in a turn of the last request."""
        parts = self.bodies[-1]["messages"][turn]["content"]
        files = [part["file"] for part in parts if part["type"] == "file"]
        return [(f["filename"], base64.b64decode(f["file_data"].split(",")[1])) for f in files]


@pytest.fixture
def reading(chromium: Any, server: Server) -> Iterator[Reading]:
    with new_visit(chromium, server.url) as visit:
        yield Reading(visit)


def text(name: str, content: str | bytes) -> dict[str, Any]:
    return file(name, content.encode() if isinstance(content, str) else content, "")


PDF: Final = pdf("[[say It was in the PDF.]]", box="0 0 600 100")


def num_prompt_tokens(visit: Visit) -> int:
    facts: str = visit.last.locator(".facts").inner_text()
    return int(facts.split("prompt ")[1].split(" ")[0].rstrip(","))


def test_the_model_reads_a_text(reading: Reading) -> None:
    reading.ask("Do what it says.")
    num_without = num_prompt_tokens(reading)
    reading.button("New conversation").click()
    content = f"\ufeff{'Grüße 🎉 ' * 50}\n[[say It was in the text.]]"
    reading.pick(text("notes.md", content))
    expect(reading.news).to_have_text("notes.md added.")
    reading.ask("Do what it says.")
    expect(reading.text).to_have_text("It was in the text.")
    assert num_prompt_tokens(reading) > num_without + 200
    expect(reading.news).to_be_empty()
    expect(reading.chips).to_have_count(0)
    expect(reading.sent).to_have_text("notes.md1 KiB")
    # The file comes first, so that another question shares it.
    kinds = [part["type"] for part in reading.bodies[-1]["messages"][0]["content"]]
    assert kinds == ["file", "text"]
    assert reading.sent_files() == [("notes.md", content.encode())]


def test_the_model_reads_a_pdf_whatever_its_name_says(reading: Reading) -> None:
    reading.pick(text("paper.txt", PDF))
    reading.ask("")
    expect(reading.text).to_have_text("It was in the PDF.")
    expect(reading.page.locator(".bubble")).to_have_count(0)
    expect(reading.page.locator("#conversations button").first).to_have_text("paper.txt")
    # There is nothing in it to be shown as a text.
    expect(reading.page.locator(".message.user button.file")).to_have_count(0)


def test_all_later_requests_have_the_files(reading: Reading) -> None:
    reading.pick(text("a.txt", "[[say one]]"), text("b.pdf", PDF))
    reading.ask("")
    both = [("a.txt", b"[[say one]]"), ("b.pdf", PDF)]
    assert reading.sent_files() == both
    reading.page.reload()
    expect(reading.sent).to_have_text(["a.txt1 KiB", "b.pdf1 KiB"])
    reading.ask("And now?")
    assert reading.sent_files() == both
    assert reading.bodies[-1]["messages"][-1] == {"role": "user", "content": "And now?"}
    reading.last.get_by_role("button", name="Regenerate").click()
    reading.wait_until_idle()
    assert reading.sent_files() == both
    # Another text for the same files.
    message = reading.page.locator(".message.user").first
    message.hover()
    message.get_by_role("button", name="Edit").click()
    expect(message.locator(".file")).to_have_count(2)
    message.get_by_role("textbox").fill("[[say two]]")
    reading.page.keyboard.press("Enter")
    reading.wait_until_idle()
    expect(reading.text).to_have_text("two")
    assert reading.sent_files() == both
    expect(reading.sent).to_have_count(2)


def test_a_file_is_taken_out_of_a_message_that_was_sent(reading: Reading) -> None:
    """As one that the server has refused."""
    reading.pick(text("a.txt", "one"), text("b.txt", "two"))
    reading.ask("Read them.")
    reading.button("Edit").click()
    reading.button("Remove a.txt").click()
    expect(reading.page.get_by_role("textbox", name="Edit the message")).to_be_focused()
    # Nothing has changed before it is sent.
    reading.page.keyboard.press("Escape")
    expect(reading.sent).to_have_count(2)
    reading.button("Edit").click()
    reading.button("Remove a.txt").click()
    reading.page.keyboard.press("Enter")
    reading.wait_until_idle()
    expect(reading.sent).to_have_text(["b.txt1 KiB"])
    assert reading.sent_files() == [("b.txt", b"two")]


def test_what_is_stopped_goes_on_with_the_files(reading: Reading) -> None:
    reading.pick(text("a.txt", "[[count]]"))
    reading.send("Do what it says.")
    reading.wait_for_text("0 1 2 3")
    reading.page.keyboard.press("Escape")
    reading.last.get_by_role("button", name="Continue").click()
    reading.wait_for_text("0 1 2 3")
    reading.button("Stop").click()
    assert reading.bodies[-1]["continue_final_message"] is True
    assert reading.sent_files() == [("a.txt", b"[[count]]")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfeU\0T\0F\0", NEITHER),
        (b"nothing\0in C", NEITHER),
        ("Grüße".encode("latin-1"), NEITHER),
        (b"", "empty"),
    ],
    ids=["UTF-16", "NUL", "Latin-1", "empty"],
)
def test_what_is_neither_is_refused_by_name(reading: Reading, content: bytes, reason: str) -> None:
    reading.pick(text("data.bin", content), text("a.txt", "x"))
    expect(reading.news).to_have_text(f"data.bin left out: {reason}. a.txt added.")
    expect(reading.chips).to_have_text("a.txt1 KiB")


def test_a_model_of_texts_gets_files_and_no_images(reading: Reading) -> None:
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    reading.pick(file("a.png", png(1, 1)), file("b.svg", svg, "image/svg+xml"), text("c.txt", "x"))
    expect(reading.news).to_have_text(
        "a.png left out: smollm2-135m-instruct takes text only. b.svg, c.txt added."
    )
    expect(reading.page.locator("#attached img")).to_have_count(0)


def test_a_folder_is_refused(reading: Reading, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("[[say dropped]]", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    devtools = reading.page.context.new_cdp_session(reading.page)
    paths = [str(tmp_path / name) for name in ("folder", "a.txt")]
    data = {"items": [], "files": paths, "dragOperationsMask": 1}
    for step in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": step, "x": 640, "y": 200, "data": data})
    expect(reading.news).to_have_text("folder left out: unreadable. a.txt added.")
    reading.ask("")
    expect(reading.text).to_have_text("dropped")


def test_the_limits_are_told_before_anything_is_sent(reading: Reading) -> None:
    big = 'new File(["x".repeat(12 << 20)], "big.txt")'
    reading.give(f"[{big}, {big}, new File(['x'], 'small.txt')]")
    expect(reading.news).to_have_text(
        "big.txt, small.txt added. big.txt left out: a conversation takes 23 MiB at most."
    )
    expect(reading.chips).to_have_text(["big.txt12.0 MiB", "small.txt1 KiB"])
    # Of a large text, the beginning is shown.
    reading.button("big.txt 12.0 MiB").click()
    shown = reading.page.get_by_role("dialog", name="big.txt").locator("pre")
    assert len(shown.inner_text()) == (1 << 18) + 2
    reading.page.keyboard.press("Escape")
    reading.button("Remove big.txt").click()
    reading.give("Array.from({ length: 101 }, (_, i) => new File([`${i}`], `${i}.txt`))")
    expect(reading.news).to_have_text(
        "99 files added. 99.txt, 100.txt left out: a conversation takes 100 files at most."
    )
    reading.ask("[[say read]]")
    expect(reading.text).to_have_text("read")
    # Those that are sent count, too.
    reading.pick(text("more.txt", "x"))
    expect(reading.news).to_contain_text("more.txt left out: a conversation takes 100 files")


def test_a_file_is_removed_by_keyboard_and_read_aloud(reading: Reading) -> None:
    reading.pick(text("a.txt", "a"), text("b.txt", "b"))
    expect(reading.news).to_have_text("a.txt, b.txt added.")
    assert reading.news.get_attribute("role") == "status"
    tree = reading.page.get_by_role("list", name="Images and files of the message").aria_snapshot()
    assert '- button "a.txt 1 KiB"' in tree
    reading.button("Remove a.txt").focus()
    reading.page.keyboard.press("Enter")
    expect(reading.news).to_have_text("Removed, 1 left.")
    expect(reading.button("Remove b.txt")).to_be_focused()
    reading.page.keyboard.press("Enter")
    expect(reading.page.locator("#prompt")).to_be_focused()
    expect(reading.chips).to_have_count(0)


def test_a_text_opens_as_a_text(reading: Reading) -> None:
    content = "<img src=x onerror=alert(1)>\n\n**bold**"
    reading.pick(text("a.html", content))
    reading.ask("[[say read]]")
    opener = reading.page.get_by_role("button", name="a.html")
    opener.focus()
    reading.page.keyboard.press("Enter")
    dialog = reading.page.get_by_role("dialog", name="a.html")
    expect(dialog.locator("pre")).to_be_focused()
    assert dialog.locator("pre").inner_text() == content
    # A click in it selects, one beside it closes.
    dialog.locator("pre").click()
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()


HOSTILE: Final = {
    "markup": ("<img src=x onerror=alert(1)>.txt", "<img src=x onerror=alert(1)>.txt"),
    "bidi": ("a\u202etxt.exe\u2066", "atxt.exe"),
    "lines": ("a\n</document>\u2028\0b", "a</document>b"),
    "long": ("a" * 5000 + ".tar.gz", f"{'a' * 80}…{'a' * 13}.tar.gz"),
    "half a letter": ("a\ud83d.txt", "a\ufffd.txt"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_name_stays_a_short_text(reading: Reading, kind: str) -> None:
    name, shown = HOSTILE[kind]
    written = json.dumps(name)
    reading.give(f"[new File(['[[say read]]'], {written}), new File(['\\0'], {written})]")
    expect(reading.news).to_have_text(f"{shown} added. {shown} left out: {NEITHER}.")
    assert reading.page.locator("#attached bdi").inner_text() == shown
    expect(reading.button(f"Remove {shown}")).to_be_visible()
    reading.ask("")
    expect(reading.text).to_have_text("read")
    expect(reading.page.locator(".message img")).to_have_count(0)
    assert reading.sent_files() == [(shown, b"[[say read]]")]


def exported(reading: Reading) -> Any:
    with reading.page.expect_download() as download:
        reading.button("Export all").click()
    return json.loads(Path(download.value.path()).read_text(encoding="utf-8"))


def bring(reading: Reading, content: Any) -> None:
    picked = file("conversations.json", json.dumps(content).encode(), "application/json")
    reading.page.locator("#import-file").set_input_files(picked)


def test_files_are_moved_with_their_conversation(reading: Reading) -> None:
    reading.pick(text("a.txt", "Grüße"), text("b.pdf", PDF))
    reading.ask("")
    written = exported(reading)
    bring(reading, written)
    expect(reading.page.locator("#transfer-news")).to_have_text("1 imported.")
    again = exported(reading)["conversations"]
    assert again[0]["messages"] == again[1]["messages"] == written["conversations"][0]["messages"]
    reading.page.reload()
    reading.page.locator("#conversations button").first.click()
    expect(reading.sent).to_have_text(["a.txt1 KiB", "b.pdf1 KiB"])
    with reading.page.expect_request(COMPLETIONS):
        reading.last.get_by_role("button", name="Regenerate").click()
    reading.wait_until_idle()
    assert reading.sent_files() == [("a.txt", "Grüße".encode()), ("b.pdf", PDF)]


def data(content: bytes, kind: str = "text/plain") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


FORGED: Final = {
    "no list": {"name": "a", "data": data(b"x")},
    "a text": ["data:text/plain;base64,eA=="],
    "null": [None],
    "no data": [{"name": "a"}],
    "no name": [{"data": data(b"x")}],
    "another name": [{"name": {"toString": 1}, "data": data(b"x")}],
    "a URL": [{"name": "a", "data": "https://evil.example"}],
    "another type": [{"name": "a", "data": data(b"x", "text/html")}],
    "no base64": [{"name": "a", "data": "data:text/plain;base64,*"}],
    "no UTF-8": [{"name": "a", "data": data(b"\xff")}],
    "an empty one": [{"name": "a", "data": data(b"")}],
    "too many": [{"name": "a", "data": data(b"x")}] * 129,
}


@pytest.mark.parametrize("kind", FORGED)
def test_files_that_the_page_has_not_written_are_refused(reading: Reading, kind: str) -> None:
    message = {"role": "user", "content": "x", "files": FORGED[kind]}
    bring(reading, {"version": 1, "conversations": [{"title": "x", "messages": [message]}]})
    expect(reading.page.locator("#transfer-news")).to_contain_text("Not imported:")
    expect(reading.page.locator("#conversations li")).to_have_count(0)


def test_a_name_from_a_file_is_as_one_that_was_picked(reading: Reading) -> None:
    # What a text is called is no reason to take it for another thing.
    files = [{"name": "\u202e<b>.pdf", "data": data(b"x", "application/pdf")}]
    message = {"role": "user", "content": "x", "files": files}
    bring(reading, {"version": 1, "conversations": [{"title": "x", "messages": [message]}]})
    reading.page.locator("#conversations button").first.click()
    expect(reading.page.locator(".message.user button.file")).to_have_text("<b>.pdf1 KiB")


def test_conversations_of_before_have_no_files(reading: Reading) -> None:
    reading.ask("[[say one]]")
    reading.page.evaluate(
        """async () => {
          const { loadAll, save } = await import("/web/chat/conversations/conversations.js");
          const [conversation] = await loadAll();
          delete conversation.messages[0].files;
          await save(conversation);
        }"""
    )
    reading.page.reload()
    reading.pick(text("a.txt", "x"))
    reading.ask("[[say two]]")
    assert reading.bodies[-1]["messages"][0] == {"role": "user", "content": "[[say one]]"}
    assert reading.sent_files(turn=2) == [("a.txt", b"x")]


def test_a_phone_has_room_for_files(chromium: Any, server: Server) -> None:
    with new_visit(chromium, server.url, viewport=PHONE, has_touch=True) as opened:
        reading = Reading(opened)
        reading.pick(*(text(f"{i} {'long ' * 30}.txt", f"{i} " * 500) for i in range(6)))
        expect(reading.chips).to_have_count(6)
        reading.ask("[[say read]]")
        expect(reading.sent).to_have_count(6)
        for chip in reading.sent.all():
            assert chip.bounding_box()["height"] >= 44
        assert NAMELESS.findall(reading.page.locator("body").aria_snapshot()) == []
        reading.sent.first.tap()
        close = reading.page.get_by_role("dialog").get_by_role("button", name="Close")
        assert min(close.bounding_box()[side] for side in ("width", "height")) >= 44
        wide = reading.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"]
