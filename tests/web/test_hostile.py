"""Responses that try to run scripts, load from other hosts, or are very long."""

from typing import Any, Final

import pytest
from playwright.sync_api import expect  # type: ignore[import-not-found]

from tests.web.visit import Visit

# Any of them that runs would call `alert`, or send a request to another host.
PAYLOADS: Final = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "<svg onload=alert(1)><script>alert(1)</script></svg>",
    "<svg><animate onbegin=alert(1) attributeName=x></svg>",
    "<iframe src='javascript:alert(1)'></iframe>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "<form action=//evil.example><button>send</button></form>",
    "<style>@import '//evil.example/x.css'; body { display: none }</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "[run](javascript:alert(1))",
    "[run](JaVaScRiPt&colon;alert(1))",
    "[run](data:text/html,<script>alert(1)</script>)",
    "[run](vbscript:alert(1))",
    "<javascript:alert(1)>",
    "![pixel](http://evil.example/pixel.png)",
    '![x](x" onerror="alert(1))',
    '[a](http://evil.example/"onmouseover="alert(1))',
    '```x" onclick="alert(1)\n<img src=x onerror=alert(1)>\n```',
    "| <img src=x onerror=alert(1)> |\n| --- |\n| <script>alert(1)</script> |",
    "- <img src=x onerror=alert(1)>\n  <script>alert(1)</script>",
    "[r]: javascript:alert(1)\n\n[r]",
    '<a href="#room" id=settings name=body>x</a>',
)

ACTIVE: Final = (
    "script, style, img, svg:not(:has(> use)), iframe, form, link, base, meta, input, object, "
    "[id], [name], [style], [onclick], [onerror], [onload], [onmouseover]"
)

FOREIGN_LINKS: Final = """(root) => [...root.querySelectorAll("a[href]")].map((a) =>
  [a.protocol, a.rel.includes("noopener"), a.target])"""


@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_runs_and_nothing_is_loaded(visit: Visit, payload: str) -> None:
    alerts: list[Any] = []

    def on_dialog(dialog: Any) -> None:
        alerts.append(dialog.message)
        dialog.dismiss()

    visit.page.on("dialog", on_dialog)
    visit.ask(f"[[say before\n\n{payload}\n\nafter]]")
    expect(visit.text).to_contain_text("before")
    expect(visit.text).to_contain_text("after")
    assert visit.text.locator(ACTIVE).count() == 0
    for link in visit.text.locator("a").all():
        link.hover()
    for protocol, is_closed, target in visit.text.evaluate(FOREIGN_LINKS):
        assert protocol in ("http:", "https:", "mailto:")
        assert is_closed
        assert target == "_blank"
    assert alerts == []


def test_html_is_shown_as_it_is(visit: Visit) -> None:
    visit.ask("[[say Use <b>bold</b> & such:\n\n<div onclick=x>text</div>]]")
    expect(visit.text).to_contain_text("Use <b>bold</b> & such:")
    expect(visit.text).to_contain_text("<div onclick=x>text</div>")


def test_the_policy_stops_what_the_sanitizer_would_let_through(visit: Visit) -> None:
    """The second line of defence, without the first one."""
    visit.expect_problem("Content.Security.Policy|TrustedHTML|violates")
    added = """(source) => new Promise((resolve) => {
      const on = (event) => resolve(event.effectiveDirective);
      document.addEventListener("securitypolicyviolation", on, { once: true });
      const image = document.createElement("img");
      image.src = source;
      document.body.append(image);
    })"""
    for source in ("http://evil.example/pixel.png", "data:image/png;base64,AAAA"):
        assert visit.page.evaluate(added, source) == "img-src"
    html = "try { document.body.innerHTML = '<b>x</b>'; 'set' } catch (error) { error.name }"
    assert visit.page.evaluate(html) == "TypeError"
    assert visit.page.evaluate("document.querySelector('main') !== null") is True
    visit.problems = [p for p in visit.problems if "request to http://evil.example" not in p]


# Each with its last line, and what that looks like.
LONG: Final = {
    "a list": ([f"- item {i} with **bold** text" for i in range(1000)], "item 999 with bold text"),
    "numbers": ([f"{i}. number {i} `code`" for i in range(1, 1001)], "number 1000 code"),
    "code": (["```python", *(f"x{i} = {i}" for i in range(1000)), "```"], "x999 = 999"),
    "paragraphs": ([f"It is [{i}](https://example.org/).\n" for i in range(500)], "It is 499."),
    "a table": (["| a |", "| --- |", *(f"| row {i} |" for i in range(1000))], "row 999"),
}

# Show a text as it grows, half a line at a time; count what is added to the page on the way.
GROW: Final = """async (lines) => {
  const { MarkdownStream } = await import("/web/chat/messages/markdown_stream.js");
  const [stream, whole] = [new MarkdownStream(), new MarkdownStream()];
  const observer = new MutationObserver(() => {});
  observer.observe(stream.element, { childList: true, subtree: true });
  let text = "";
  for (const line of lines) {
    const half = Math.floor(line.length / 2);
    text += line.slice(0, half);
    stream.update(text, false);
    text += line.slice(half) + "\\n";
    stream.update(text, false);
  }
  const records = observer.takeRecords();
  for (const each of [stream, whole]) each.update(text);
  const [grown, atOnce] = [stream, whole].map((s) => s.element.innerHTML.replaceAll(/\\s*\\n\\s*/g, ""));
  const added = records.flatMap((record) => [...record.addedNodes]);
  const sizeOf = (node) => 1 + (node.querySelectorAll?.("*").length ?? 0);
  return [added.reduce((sum, node) => sum + sizeOf(node), 0), grown, atOnce];
}"""

MIXED: Final = [
    *("[r]: https://example.org", "", "# Title", "", "Text *with* [r].", "more", "", "1. one"),
    *("2. two", "   - nested", "   - also", "3. three", "", "> quote", "", "| a | b |"),
    *("| - | - |", "| 1 | 2 |", "| 3 | 4 |", "", "Heading", "---", "- a", "---", "~~~", "- none"),
    *("~~~", "<b>", "", "    indented", "", "- x", "* y", "", "end"),
]


@pytest.mark.parametrize("kind", LONG)
def test_each_line_is_rendered_once(visit: Visit, kind: str) -> None:
    """A line is rendered again with its own tokens only, not with those of all that follow."""
    lines, _ = LONG[kind]
    num_added, grown, at_once = visit.page.evaluate(GROW, lines)
    assert num_added < 20 * len(lines)
    assert grown == at_once


def test_what_grows_becomes_what_is_rendered_at_once(visit: Visit) -> None:
    _, grown, at_once = visit.page.evaluate(GROW, MIXED)
    assert grown == at_once


def test_a_link_may_be_defined_after_it_is_named(visit: Visit) -> None:
    lines = ["See [r].", "", "Then", "", "[r]: https://example.org"]
    _, grown, at_once = visit.page.evaluate(GROW, lines)
    assert grown == at_once
    assert 'href="https://example.org"' in grown


@pytest.mark.parametrize("kind", LONG)
def test_a_thousand_lines_stream_in(visit: Visit, kind: str) -> None:
    visit.page.set_default_timeout(90_000)
    lines, end = LONG[kind]
    text = "\n".join(lines)
    visit.ask(f"[[say {text}]]")
    assert visit.text.inner_text().rstrip().endswith(end)


def test_a_long_paragraph_of_markers_does_not_hang_the_page(visit: Visit) -> None:
    visit.page.set_default_timeout(90_000)
    visit.ask(f"[[say {'*a_' * 6000}]]")
    expect(visit.text).to_contain_text("*a_*a_")
    visit.ask("[[say done]]")
    expect(visit.text).to_have_text("done")


# Each of them took the square of its length, in the expressions of the lexer or by what it begins again and again.
QUADRATIC: Final = {
    "an address that does not end": "a." * 9000 + "@",
    "images that do not begin": "!" * 18_000,
    "spaces": "x  " * 6000,
    "brackets": "[" * 18_000,
    "an item without end": "- a" + "\n\t(" * 16_000,
    "lists in lists": " +" * 9000,
    "quotes in quotes": "> " * 300 + "a\n" * 9000,
}

# Count what the lexer looks at: the longest text at once, and what lies ahead of each block up to the next blank line.
COUNT: Final = """async (text) => {
  const { Lexer, Tokenizer } = await import("/web/vendor/marked.esm.js");
  const { lex } = await import("/web/chat/messages/markdown.js");
  const { inlineTokens } = Lexer.prototype;
  const { heading } = Tokenizer.prototype;
  let [longest, ahead] = [0, 0];
  Lexer.prototype.inlineTokens = function (source, ...rest) {
    longest = Math.max(longest, source.length);
    return inlineTokens.call(this, source, ...rest);
  };
  Tokenizer.prototype.heading = function (source) {
    const blank = source.indexOf("\\n\\n");
    ahead += blank < 0 ? source.length : blank;
    return heading.call(this, source);
  };
  let shown = "";
  try {
    for (const token of lex(text, Object.create(null))) shown += token.raw;
  } finally {
    Object.assign(Lexer.prototype, { inlineTokens });
    Object.assign(Tokenizer.prototype, { heading });
  }
  return [longest, ahead, shown.replaceAll(/\\s/g, "") === text.replaceAll(/\\s/g, "")];
}"""


@pytest.mark.parametrize("kind", QUADRATIC)
def test_no_text_is_looked_at_without_end(visit: Visit, kind: str) -> None:
    text = QUADRATIC[kind]
    longest, ahead, is_whole = visit.page.evaluate(COUNT, text)
    assert longest <= 2000
    assert ahead <= 1_000_000 + 50 * len(text)
    assert is_whole


def test_a_long_paragraph_keeps_its_markdown(visit: Visit) -> None:
    lines = [f"It is **{i}**, see [here](https://example.org/{i})." for i in range(200)]
    _, grown, at_once = visit.page.evaluate(GROW, lines)
    assert grown == at_once
    assert grown.count("<br>") == 199
    for i in range(200):
        assert f"<strong>{i}</strong>" in grown
        assert f'href="https://example.org/{i}"' in grown
