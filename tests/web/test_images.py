"""Images on the page: how they are added, shown, sent and kept.

The scripted model takes text only, so the model's card and the answers are written here.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from scripts.server_process import Server
from tests.web.pictures import (
    BLUE,
    CLEAR,
    GREEN,
    RED,
    WHITE,
    Seen,
    file,
    png,
    seen,
    turned_jpeg,
)
from tests.web.visit import NAMELESS, PHONE, Visit, new_visit

MODEL: Final = "smollm2-135m-instruct"
TAKES_IMAGES: Final = {"architecture": {"input_modalities": ["text", "image"]}}
MODELS: Final = "**/v1/models"
COMPLETIONS: Final = "**/v1/chat/completions"


@dataclass
class Looking(Visit):
    """A visit to a server whose model sees images; `bodies` are the requests that it got."""

    bodies: list[dict[str, Any]] = field(default_factory=list)

    def let_see(self, **card: Any) -> None:
        """Change what the server says of its model, and open the page again."""
        models = self.page.request.get(f"{self.url}/v1/models").json()
        models["data"][0] |= card
        self.page.route(MODELS, lambda route: route.fulfill(json=models))
        self.page.route(COMPLETIONS, self._answer)
        self.page.reload()
        # It has the list.
        expect(self.picker).to_have_value(MODEL)

    def _answer(self, route: Any) -> None:
        self.bodies.append(route.request.post_data_json)
        chunk = {"choices": [{"index": 0, "delta": {"content": "I see."}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, headers={"content-type": "text/event-stream"})

    # What is on it.

    @property
    def picker(self) -> Any:
        return self.page.get_by_role("combobox", name="Model")

    @property
    def button(self) -> Any:
        return self.page.get_by_role("button", name="Add images or files")

    @property
    def strip(self) -> Any:
        """The images that are not sent yet."""
        return self.page.get_by_role("list", name="Images and files of the message").get_by_role(
            "listitem"
        )

    @property
    def news(self) -> Any:
        return self.page.locator("#attached-news")

    def sent_images(self, turn: int = 0) -> list[Seen]:
        """Return the images in a turn of the last request, and check that its other parts are before them."""
        parts = self.bodies[-1]["messages"][turn]["content"]
        kinds = [part["type"] for part in parts]
        assert kinds == sorted(kinds, reverse=True)
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        return [seen(self.page, url) for url in urls]

    # What a user does.

    def pick(self, *files: dict[str, Any]) -> None:
        with self.page.expect_file_chooser() as chooser:
            self.button.click()
        assert chooser.value.is_multiple()
        chooser.value.set_files(files)

    def drag(self, paths: Sequence[Path], *steps: str) -> None:
        """Drag files over the page, as the system does it."""
        devtools = self.page.context.new_cdp_session(self.page)
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for step in steps:
            place = {"type": step, "x": 640, "y": 200, "data": data}
            devtools.send("Input.dispatchDragEvent", place)


@pytest.fixture
def visit(chromium: Any, server: Server) -> Iterator[Looking]:
    with new_visit(chromium, server.url) as visit:
        yield Looking(visit.page, visit.url, visit.problems)


@pytest.fixture
def looking(visit: Looking) -> Looking:
    visit.let_see(**TAKES_IMAGES)
    return visit


def files_in(folder: Path, **contents: bytes) -> list[Path]:
    paths = [folder / f"{name}.png" for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


def test_what_is_picked_is_sent_in_order_and_shown(looking: Looking) -> None:
    looking.pick(file("a.png", png(30, 20, RED)), file("b.png", png(20, 30, BLUE)))
    expect(looking.news).to_have_text("a.png, b.png added.")
    # Picked again: those of before stay.
    looking.pick(file("a.png", png(30, 20, GREEN)))
    expect(looking.strip).to_have_count(3)
    looking.ask("What are these?")
    expect(looking.strip).to_have_count(0)
    expect(looking.news).to_be_empty()
    png_head = "data:image/png;base64"
    assert looking.bodies[0]["messages"][0]["content"][0] == {
        "type": "text",
        "text": "What are these?",
    }
    assert looking.sent_images() == [
        Seen(png_head, 30, 20, RED),
        Seen(png_head, 20, 30, BLUE),
        Seen(png_head, 30, 20, GREEN),
    ]
    names = [image.get_attribute("alt") for image in looking.page.locator(".user img").all()]
    assert names == ["Image 1 of 3", "Image 2 of 3", "Image 3 of 3"]
    # The next turn is a plain text, and the conversation still has them.
    looking.ask("And now?")
    assert len(looking.sent_images()) == 3
    assert looking.bodies[-1]["messages"][-1] == {"role": "user", "content": "And now?"}


def test_the_other_field_of_a_card_also_says_that_a_model_takes_images(visit: Looking) -> None:
    visit.let_see(capabilities=["completion", "vision"])
    visit.pick(file("a.png", png(1, 1)))
    expect(visit.news).to_have_text("a.png added.")


def test_images_need_no_text(looking: Looking) -> None:
    looking.pick(file("a.png", png(8, 8)))
    expect(looking.strip).to_have_count(1)
    looking.ask("")
    assert [part["type"] for part in looking.bodies[0]["messages"][0]["content"]] == ["image_url"]
    expect(looking.page.locator("#conversations button").first).to_have_text("Images")
    expect(looking.page.locator(".bubble")).to_have_count(0)


def test_large_images_are_scaled_down_and_all_are_upright_and_opaque(looking: Looking) -> None:
    looking.pick(
        file("wide.png", png(3000, 1500, BLUE)),
        file("turned.jpg", turned_jpeg(looking.page, 80, 40), "image/jpeg"),
        file("clear.png", png(10, 10, CLEAR)),
    )
    looking.ask("What are these?")
    wide, turned, clear = looking.sent_images()
    assert wide == Seen("data:image/png;base64", 2048, 1024, BLUE)
    assert turned[:3] == ("data:image/jpeg;base64", 40, 80)
    assert turned.colour[0] > 240
    assert clear.colour == WHITE


NOISE: Final = """(side) => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const row = context.createImageData(side, 1);
  for (let y = 0; y < side; y += 1) {
    crypto.getRandomValues(row.data);
    context.putImageData(row, 0, y);
  }
  return canvas.toDataURL("image/png").split(",")[1];
}"""


def test_a_photo_is_sent_as_a_jpeg(looking: Looking) -> None:
    content = base64.b64decode(looking.page.evaluate(NOISE, 1000))
    looking.pick(file("photo.png", content))
    looking.ask("What is it?")
    (image,) = looking.sent_images()
    assert image[:3] == ("data:image/jpeg;base64", 1000, 1000)


COPY_IMAGE: Final = """async (data) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt());
  const item = { "image/png": new Blob([bytes], { type: "image/png" }) };
  await navigator.clipboard.write([new ClipboardItem(item)]);
}"""

# As programs copy cells of a table: as a text, and as a picture of it.
PASTE_BOTH: Final = """() => {
  const clipboardData = new DataTransfer();
  clipboardData.setData("text/plain", "1\\t2");
  clipboardData.items.add(new File(["x"], "image.png", { type: "image/png" }));
  const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
  return document.activeElement.dispatchEvent(event);
}"""


def test_an_image_is_pasted_and_a_text_stays_one(looking: Looking) -> None:
    looking.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    content = base64.b64encode(png(12, 6, GREEN)).decode()
    looking.page.evaluate(COPY_IMAGE, content)
    looking.page.locator("#prompt").focus()
    looking.page.keyboard.press("Control+V")
    expect(looking.news).to_have_text("image.png added.")
    assert looking.page.evaluate(PASTE_BOTH) is True  # the browser's own doing
    looking.ask("What is it?")
    (image,) = looking.sent_images()
    assert image[1:] == (12, 6, GREEN)


def test_files_are_dropped_anywhere_on_the_page(looking: Looking, tmp_path: Path) -> None:
    target = looking.page.get_by_text("Drop images, texts or PDFs here")
    paths = files_in(tmp_path, red=png(5, 5, RED), none=b"\x89PNG", blue=png(6, 6, BLUE))
    looking.drag(paths, "dragEnter", "dragOver")
    expect(target).to_be_visible()
    # It leaves the window.
    looking.page.dispatch_event("body", "dragleave")
    expect(target).to_be_hidden()
    looking.drag(paths, "dragEnter", "dragOver", "drop")
    expect(target).to_be_hidden()
    expect(looking.news).to_have_text(
        "red.png, blue.png added."
        " none.png left out: neither an image nor a PDF nor a text in UTF-8."
    )
    looking.ask("What are these?")
    assert [image.width for image in looking.sent_images()] == [5, 6]


def test_an_image_is_removed_by_keyboard(looking: Looking) -> None:
    looking.pick(*(file(f"{side}.png", png(side, side)) for side in (1, 2, 3)))
    expect(looking.news).to_have_text("1.png, 2.png, 3.png added.")
    remove = looking.page.get_by_role("button", name="Remove image")
    looking.page.get_by_role("button", name="Remove image 2 of 3").focus()
    looking.page.keyboard.press("Enter")
    expect(looking.news).to_have_text("Removed, 2 left.")
    # The focus goes to the next one.
    expect(looking.page.get_by_role("button", name="Remove image 2 of 2")).to_be_focused()
    looking.page.keyboard.press("Enter")
    expect(remove).to_be_focused()
    looking.page.keyboard.press("Enter")
    expect(looking.news).to_have_text("Removed, none left.")
    expect(looking.page.locator("#prompt")).to_be_focused()
    looking.pick(file("1.png", png(1, 1)), file("2.png", png(2, 2)))
    looking.page.get_by_role("button", name="Remove image 1 of 2").click()
    looking.ask("What is it?")
    assert [image.width for image in looking.sent_images()] == [2]


def test_a_conversation_takes_as_many_as_the_server_does(visit: Looking) -> None:
    visit.let_see(**TAKES_IMAGES, max_images=3)
    visit.pick(file("1.png", png(1, 1)), file("2.png", png(2, 2)))
    visit.ask("What are these?")
    visit.pick(*(file(f"{side}.png", png(side, side)) for side in (3, 4, 5)))
    expect(visit.news).to_have_text(
        "3.png added. 4.png, 5.png left out: a conversation takes 3 images at most."
    )
    expect(visit.strip).to_have_count(1)


def test_there_is_a_limit_where_the_server_states_none(looking: Looking) -> None:
    looking.pick(*(file(f"{i}.png", png(1, 1)) for i in range(33)))
    expect(looking.news).to_have_text(
        "32 files added. 32.png left out: a conversation takes 32 images at most.",
        timeout=20_000,
    )
    expect(looking.strip).to_have_count(32)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ({"capabilities": ["completion"]}, f"{MODEL} takes text only"),
        ({"architecture": {"input_modalities": ["text"]}}, f"{MODEL} takes text only"),
        (
            {"capabilities": None, "architecture": None},
            f"The server does not say that {MODEL} takes images",
        ),
    ],
    ids=["capabilities", "modalities", "unsaid"],
)
def test_a_model_of_texts_gets_no_images(
    visit: Looking, tmp_path: Path, card: dict[str, Any], reason: str
) -> None:
    visit.let_see(**card)
    paths = files_in(tmp_path, red=png(5, 5))
    visit.drag(paths, "dragEnter", "dragOver")
    expect(visit.page.locator("#drop")).to_have_text("Drop texts or PDFs here")
    visit.drag(paths, "drop")
    expect(visit.news).to_have_text(f"red.png left out: {reason}.")
    expect(visit.strip).to_have_count(0)
    visit.ask("What is it?")
    assert visit.bodies[0]["messages"] == [{"role": "user", "content": "What is it?"}]


def test_what_was_added_waits_for_a_model_that_takes_it(visit: Looking) -> None:
    visit.let_see(**TAKES_IMAGES)
    visit.pick(file("1.png", png(1, 1)))
    expect(visit.strip).to_have_count(1)
    # The model has become another one.
    other = {"data": [{"id": MODEL, "capabilities": ["completion"]}]}
    visit.page.route(MODELS, lambda route: route.fulfill(json=other))
    visit.picker.focus()
    # It has the list.
    visit.page.wait_for_function(
        "import('/web/models.js').then(({ models, takesImages }) => takesImages(models()[0]) === false)"
    )
    visit.send("What is it?")
    expect(visit.news).to_have_text(f"{MODEL} takes text only.")
    expect(visit.page.get_by_role("textbox", name="Message")).to_have_value("What is it?")
    expect(visit.page.locator(".message")).to_have_count(0)
    visit.page.get_by_role("button", name="Remove image 1 of 1").click()
    visit.ask("What is it?")
    assert visit.bodies[0]["messages"] == [{"role": "user", "content": "What is it?"}]


# Images are read once the test says so.
HOLD: Final = """() => {
  const read = window.createImageBitmap;
  const held = new Promise((resolve) => { window.goOn = resolve; });
  window.createImageBitmap = (...args) => held.then(() => read(...args));
}"""


def test_what_is_still_read_is_waited_for(looking: Looking) -> None:
    looking.page.evaluate(HOLD)
    looking.pick(file("1.png", png(7, 7)))
    looking.send("What is it?")
    looking.page.keyboard.press("Enter")
    expect(looking.page.locator(".message")).to_have_count(0)
    looking.page.evaluate("window.goOn()")
    looking.wait_until_idle()
    assert [image.width for image in looking.sent_images()] == [7]
    assert len(looking.bodies) == 1


def test_images_survive_a_reload(looking: Looking) -> None:
    looking.pick(file("1.png", png(9, 5, BLUE)))
    looking.ask("What is it?")
    first = looking.sent_images()
    looking.page.reload()
    image = looking.page.locator(".user img")
    expect(image).to_have_js_property("naturalWidth", 9)
    with looking.page.expect_request(COMPLETIONS):
        looking.last.get_by_role("button", name="Regenerate").click()
    looking.wait_until_idle()
    assert looking.sent_images() == first
    # Where they were, they are deleted with their conversation.
    looking.page.on("dialog", lambda dialog: dialog.accept())
    looking.page.get_by_role("button", name="Delete What is it?").click()
    looking.page.reload()
    expect(looking.page.locator("#conversations li")).to_have_count(0)


def test_another_text_has_the_same_images(looking: Looking) -> None:
    looking.pick(file("1.png", png(9, 5, BLUE)))
    looking.ask("What is it?")
    message = looking.page.locator(".message.user")
    message.hover()
    message.get_by_role("button", name="Edit").click()
    expect(message.get_by_role("img", name="Image 1 of 1")).to_be_visible()
    looking.page.keyboard.press("Escape")
    expect(message.get_by_role("button", name="Edit")).to_be_focused()
    looking.page.keyboard.press("Enter")
    message.get_by_role("textbox").fill("")
    looking.page.keyboard.press("Enter")
    expect(looking.page.locator(".bubble")).to_have_count(0)
    looking.wait_until_idle()
    assert len(looking.bodies) == 2
    assert [image.width for image in looking.sent_images()] == [9]
    expect(message.get_by_role("img", name="Image 1 of 1")).to_be_visible()


def test_an_image_opens_in_full_and_escape_closes_nothing_else(looking: Looking) -> None:
    looking.pick(file("1.png", png(2000, 3000)))
    looking.ask("What is it?")
    looking.page.unroute(COMPLETIONS)
    looking.page.route(COMPLETIONS, lambda route: None)  # it stays open
    looking.send("And now?")
    opener = looking.page.get_by_role("button", name="Image 1 of 1")
    opener.focus()
    looking.page.keyboard.press("Enter")
    dialog = looking.page.get_by_role("dialog", name="Image 1 of 1")
    expect(dialog.get_by_role("img", name="Image 1 of 1")).to_be_visible()
    expect(dialog.get_by_role("button", name="Close")).to_be_focused()
    box, viewport = dialog.bounding_box(), looking.page.viewport_size
    assert box["width"] <= viewport["width"]
    assert box["height"] <= viewport["height"]
    looking.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()
    expect(looking.page.locator(".streaming")).to_have_count(1)
    opener.click()
    dialog.get_by_role("img").click()
    expect(dialog).to_be_hidden()
    looking.page.get_by_role("button", name="Stop").click()


def test_a_phone_has_room_for_images(chromium: Any, server: Server) -> None:
    phone = {"viewport": PHONE, "has_touch": True, "color_scheme": "dark"}
    with new_visit(chromium, server.url, **phone) as opened:
        visit = Looking(opened.page, opened.url, opened.problems)
        visit.let_see(**TAKES_IMAGES)
        files = [file(f"{i}.png", png(40 + i, 40)) for i in range(12)]
        visit.pick(*files)
        expect(visit.strip).to_have_count(12)
        names = ("Add images or files", "Remove image 1 of 12", "Image 1 of 12", "Send")
        for name in names:
            box = visit.page.get_by_role("button", name=name, exact=True).bounding_box()
            assert min(box["width"], box["height"]) >= 44, name
        assert NAMELESS.findall(visit.page.locator("body").aria_snapshot()) == []
        assert is_narrow(visit)
        visit.page.get_by_role("button", name="Send").tap()
        visit.wait_until_idle()
        expect(visit.page.locator(".user img")).to_have_count(12)
        assert NAMELESS.findall(visit.page.locator("body").aria_snapshot()) == []
        assert is_narrow(visit)
        visit.page.get_by_role("button", name="Image 12 of 12").tap()
        dialog = visit.page.get_by_role("dialog")
        close = dialog.get_by_role("button", name="Close").bounding_box()
        assert min(close["width"], close["height"]) >= 44
        assert is_narrow(visit)


def is_narrow(visit: Visit) -> bool:
    wide: int = visit.page.evaluate("document.documentElement.scrollWidth")
    return wide <= PHONE["width"]
