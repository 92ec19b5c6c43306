// Markdown to elements.  HTML in it is shown as text; what comes out is sanitised all the same.

import { Marked, Lexer, Parser } from "../../vendor/marked.esm.js";
import "../../vendor/purify.min.js";
import { copyButton, h } from "../../dom.js";

const { DOMPurify } = globalThis;

// Characters, and markers of emphasis and of formulas among them.  A paragraph with more is shown as it is.
const MAX_INLINE = 20_000;
const MAX_MARKERS = 1000;
const MARKERS = /[*_~$\\]/g;
// Characters of a paragraph that are looked at together: the lexer's expressions may take the square of them.
const MAX_PIECE = 2000;
// Characters that are looked at in all, each as often as it lies ahead of a token: so many, and for each character.
const MAX_AHEAD = 1_000_000;
const MAX_AHEAD_EACH = 50;

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

let numAhead = 0; // that may still be looked at

/** Looks at a source before any token is: what exceeds the work that a text may take is shown as it is. */
const limit = (level) => ({
  name: `limit of ${level}s`,
  level,
  tokenizer(source) {
    const blank = source.indexOf("\n\n");
    numAhead -= blank < 0 ? source.length : blank;
    return numAhead < 0 ? { type: "text", raw: source, text: source } : undefined;
  },
});

const { defaults } = new Marked({
  extensions: [limit("block"), limit("inline"), formula],
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
  numAhead = MAX_AHEAD + MAX_AHEAD_EACH * text.length;
  const tokens = lexer.blockTokens(text, lexer.tokens);
  for (const { src, tokens: inline } of lexer.inlineQueue) {
    const numMarkers = src.match(MARKERS)?.length ?? 0;
    if (src.length > MAX_INLINE || numMarkers > MAX_MARKERS) {
      inline.push({ type: "text", raw: src, text: src });
      continue;
    }
    for (const piece of pieces(src)) lexer.inlineTokens(piece, inline);
  }
  return tokens;
}

/** A paragraph in pieces, which end with a line or else with a word if they can. */
function* pieces(text) {
  let rest = text;
  while (rest.length > MAX_PIECE) {
    const head = rest.slice(0, MAX_PIECE);
    const end = [head.lastIndexOf("\n"), head.lastIndexOf(" ")].find((at) => at > 0) ?? MAX_PIECE;
    yield rest.slice(0, end);
    rest = rest.slice(end);
  }
  yield rest;
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
