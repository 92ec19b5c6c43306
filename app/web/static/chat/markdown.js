// Markdown to elements.  HTML in it is shown as text; what comes out is sanitised all the same.

import { Marked, Lexer, Parser } from "../vendor/marked.esm.js";
import "../vendor/purify.min.js";
import { copyButton, h } from "../dom.js";

const { DOMPurify } = globalThis;

// Characters, and markers of emphasis and of formulas among them, which could take quadratic time.  A paragraph
// with more is shown as it is.
const MAX_INLINE = 20_000;
const MAX_MARKERS = 1000;
const MARKERS = /[*_~$\\]/g;

// Formulas are shown as they are written: `*`, `_` and `\` in them are no Markdown.
const FORMULA = /^(?:\$\$[^$]+\$\$|\$(?!\s)[^$\n]+(?<!\s)\$(?!\d)|\\\((?:(?!\\\))[^])+\\\)|\\\[(?:(?!\\\])[^])+\\\])/;

const escaped = (text) =>
  text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const formula = {
  name: "formula",
  level: "inline",
  start: (source) => source.match(/\$|\\[([]/)?.index,
  tokenizer(source) {
    const [raw] = FORMULA.exec(source) ?? [];
    return raw && { type: "formula", raw };
  },
  renderer: ({ raw }) => escaped(raw).replaceAll("\n", "<br>"),
};

const { defaults } = new Marked({
  extensions: [formula],
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ block, text }) => (block ? `<p>${escaped(text.trimEnd())}</p>` : escaped(text)),
    // Nothing is loaded for an answer, from no host.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const SANITIZER = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    ...["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr"],
    ...["li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // Neither scripts nor links into this page.
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};

/** The blocks of a text; `links` keeps the definitions of links from one call to the next. */
export function lex(text, links) {
  const lexer = new Lexer(defaults);
  lexer.tokens.links = links;
  const tokens = lexer.blockTokens(text, lexer.tokens);
  for (const { src, tokens: inline } of lexer.inlineQueue) {
    const numMarkers = src.match(MARKERS)?.length ?? 0;
    if (src.length <= MAX_INLINE && numMarkers <= MAX_MARKERS) lexer.inlineTokens(src, inline);
    else inline.push({ type: "text", raw: src, text: src });
  }
  return tokens;
}

/** The elements of a block. */
export function render(token) {
  const fragment = token.type === "code"
    ? plainCode(token)
    : DOMPurify.sanitize(Parser.parse([token], defaults), SANITIZER);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(framed(pre));
  for (const table of fragment.querySelectorAll("table")) scrollable(table);
  return fragment;
}

function plainCode({ lang, text }) {
  const fragment = document.createDocumentFragment();
  const language = (lang ?? "").match(/^\S*/)[0];
  fragment.append(h("pre", {}, h("code", { class: language ? `language-${language}` : null, text })));
  return fragment;
}

/** Code below its language and a button that copies it. */
function framed(pre) {
  const code = pre.firstElementChild ?? pre;
  const language = code.className.replace(/^language-/, "");
  const copied = pre.cloneNode(true);
  copied.tabIndex = 0;
  return h("div", { class: "code-block" },
    h("div", { class: "code-head" }, h("span", { text: language }),
      copyButton("Copy the code", () => copied.textContent)),
    copied);
}

function scrollable(table) {
  const frame = h("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" });
  table.replaceWith(frame);
  frame.append(table);
}
