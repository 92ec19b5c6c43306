// Renders a text that grows: each block once, and again only while it is the last one.

import { h } from "../../dom.js";
import { lex, render } from "./markdown.js";

export class MarkdownStream {
  element = h("div", { class: "markdown" });
  #text = "";
  #numSettled = 0; // characters whose elements do not change any more
  #tail = []; // the elements of the others
  #openList = null; // the list whose last item is not settled
  #open = null; // the last block, if it is code or a table: what is added to
  #links = Object.create(null); // the definitions that are settled
  #numLinks = 0; // definitions at the beginning
  #numKnown = 0; // definitions now: links that name them may come before

  /** Show a text, which continues the last one or is another; `isWhole` says that it has ended. */
  update(text, isWhole = true) {
    const next = text.replace(/\r\n?/g, "\n");
    if (next !== this.#text) this.#grow(next);
    if (!isWhole || this.#numKnown === this.#numLinks) return;
    this.#restart();
    this.#grow(next);
  }

  #grow(next) {
    if (!next.startsWith(this.#text)) this.#restart();
    const isFirst = this.#text === "";
    this.#text = next;
    const tail = next.slice(this.#numSettled);
    try {
      const links = Object.assign(Object.create(null), this.#links);
      this.#show(tail, lex(tail, links));
      this.#numKnown = Object.keys(links).length;
      if (isFirst) this.#numLinks = this.#numKnown;
    } catch {
      // Nested deeper than the stack allows.
      this.#restart();
      this.#replaceTail(h("p", { text: next }));
    }
  }

  #restart() {
    this.#text = "";
    this.element.replaceChildren();
    this.#numSettled = 0;
    this.#tail = [];
    this.#openList = this.#open = null;
    this.#links = Object.create(null);
  }

  #show(source, tokens) {
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const open = tokens[last];
    if (last === 0 && this.#grows(open)) return;
    this.#replaceTail();
    const before = tokens.slice(0, Math.max(0, last));
    // The lexer's pieces are the source, or nothing is settled.
    const isSettled = this.#settle(source, before);
    before.forEach((token, i) => this.#append(token, !isSettled, i === 0));
    if (isSettled && before.length) this.#openList = null;
    if (open) this.#appendOpen(open, isSettled, last === 0);
  }

  #settle(source, pieces) {
    const raw = pieces.map((piece) => piece.raw).join("");
    if (!source.startsWith(raw)) return false;
    this.#numSettled += raw.length;
    for (const { type, tag, href, title } of pieces) {
      if (type === "def") this.#links[tag] ??= { href, title };
    }
    return true;
  }

  /** Add the last block; of a list, all items but the last are settled. */
  #appendOpen(token, mayBeSettled, isFirst) {
    const before = (token.items ?? []).slice(0, -1);
    if (before.length && mayBeSettled && this.#settle(token.raw, before)) {
      this.#append({ ...token, items: before }, false, isFirst);
      this.#openList ??= this.element.lastElementChild;
      this.#append({ ...token, items: token.items.slice(-1) }, true, true);
      return;
    }
    this.#append(token, true, isFirst);
    if (token.type !== "code" && token.type !== "table") return;
    const [element] = this.#tail;
    this.#open = { token, code: element.querySelector("code"), rows: element.querySelector("tbody") };
  }

  /** Add a block, to the open list if it is the first one and continues that. */
  #append(token, isTail, isFirst) {
    const fragment = render(token);
    const isContinued = isFirst && fragment.firstElementChild?.tagName === this.#openList?.tagName;
    const list = isContinued ? this.#openList : null;
    const nodes = [...(list ? fragment.firstElementChild : fragment).childNodes];
    (list ?? this.element).append(...nodes);
    if (isTail) this.#tail.push(...nodes);
  }

  /** Whether a block is the one that is shown already, to which what is new was added then. */
  #grows(token) {
    const { token: before, code, rows } = this.#open ?? {};
    if (token.type !== before?.type) return false;
    if (code && token.lang === before.lang) growCode(code, token.text);
    else if (rows && headerOf(token) === headerOf(before)) growTable(rows, token);
    else return false;
    return true;
  }

  #replaceTail(...nodes) {
    for (const node of this.#tail) node.remove();
    this.#tail = nodes;
    this.#open = null;
    this.element.append(...nodes);
  }
}

function growCode(code, text) {
  const shown = code.firstChild;
  if (shown && text.startsWith(shown.data)) shown.appendData(text.slice(shown.data.length));
  else code.textContent = text;
}

const headerOf = (table) => table.header.map(({ text }) => text).join("|");

/** All rows but the last one are as they were. */
function growTable(rows, token) {
  const numKept = rows.children.length - 1;
  rows.lastElementChild.remove();
  const added = render({ ...token, rows: token.rows.slice(numKept) });
  rows.append(...added.querySelector("tbody").children);
}
