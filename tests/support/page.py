"""What an HTML report must be: well nested, whole in itself, and in the page's colours."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Counts tags and checks that each is closed in order."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str, num_figures: int) -> None:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.counts["figure"] == page.counts["svg"] == num_figures
    # Nothing is fetched, and each colour of a chart is one of the page's.
    assert not {"script", "link", "img"} & set(page.counts)
    body = text.partition("</style>")[2]
    assert re.findall(r"[ :]#[0-9a-f]{6}", body) == []
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= set(re.findall(r"(--[\w-]+):", text))
    names = re.findall(r' id="([^"]+)"', text)
    assert len(set(names)) == len(names)
