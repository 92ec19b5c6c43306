// Files: texts and PDFs, from those that a user has to what is kept and shown.

import { h } from "../../dom.js";
import { view } from "./viewer.js";

const PDF = "application/pdf";
// Bytes in which the server looks for the beginning of a PDF, and that are shown of a text.
const PDF_HEAD = 1024;
const MAX_SHOWN = 1 << 18;

/** What is kept of a text or a PDF, {name, blob}; rejects with the reason if the file is neither. */
export async function readFile(file) {
  const bytes = await file.arrayBuffer().catch(() => { throw new Error("unreadable"); });
  if (!bytes.byteLength) throw new Error("empty");
  const isPdf = new TextDecoder("latin1").decode(bytes.slice(0, PDF_HEAD)).includes("%PDF-");
  if (!isPdf && !isText(bytes)) throw new Error("neither an image nor a PDF nor a text in UTF-8");
  return { name: nameOf(file), blob: new Blob([bytes], { type: isPdf ? PDF : "text/plain" }) };
}

function isText(bytes) {
  try {
    return !new TextDecoder("utf-8", { fatal: true }).decode(bytes).includes("\0");
  } catch {
    return false;
  }
}

/** A name as one short line that does not turn the text around it. */
export const nameOf = ({ name }) => name.toWellFormed()
  .replaceAll(/[\p{Cc}\p{Zl}\p{Zp}\p{Bidi_Control}]/gu, "").replace(/^(.{80}).+(.{20})$/u, "$1…$2");

/** The name and the size of each file; a text's is a button, which shows it. */
export const chips = (files) => files.map(({ name, blob }) => {
  const content = [h("bdi", { text: name }), h("small", { text: sizeOf(blob) })];
  if (blob.type === PDF) return h("span", { class: "file" }, ...content);
  const click = async () => {
    const text = await blob.slice(0, MAX_SHOWN).text();
    view(name, h("pre", { tabindex: 0, text: blob.size > MAX_SHOWN ? `${text} …` : text }));
  };
  return h("button", { type: "button", class: "file", "aria-haspopup": "dialog", on: { click } }, ...content);
});

const sizeOf = ({ size }) =>
  (size < 1 << 20 ? `${Math.ceil(size / 1024)} KiB` : `${(size / (1 << 20)).toFixed(1)} MiB`);
