// The images and files that go with the next message: picked, pasted or dropped.

import { $, setText } from "../dom.js";
import { modelOf, takesImages } from "../models.js";
import { settings } from "../settings.js";
import { removable } from "./messages/attached.js";
import { nameOf, readFile } from "./messages/files.js";
import { readImage } from "./messages/images.js";

// Of a conversation, where the server does not say how many a request may have.
const MAX_IMAGES = 32;
// Of a conversation: files, and bytes, which are within the body of a request as base64.
const MAX_FILES = 100;
const MAX_BYTES = 23 << 20;

export class Attachments {
  #attached = { images: [], files: [] };
  #sent;
  #read = Promise.resolve();

  /** `sent()`: the images and files that the conversation has without these. */
  constructor(sent) {
    this.#sent = sent;
    const files = $("attached-files");
    $("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.#add(files.files);
      files.value = ""; // the same ones may be picked again
    });
    document.addEventListener("paste", (event) => this.#onPaste(event));
    document.addEventListener("dragover", (event) => this.#onDrag(event));
    document.addEventListener("dragleave", ({ relatedTarget }) => { $("drop").hidden ||= !relatedTarget; });
    document.addEventListener("drop", (event) => this.#onDrop(event));
  }

  /** Wait for those that are still read; return whether there is something to send, with `text`, to the chosen model. */
  async isReady(text) {
    await this.#read;
    const fault = this.#attached.images.length && refusal();
    if (fault) this.#tell(`${fault}.`);
    return !fault && (text() !== "" || $("attached").children.length > 0);
  }

  /** The images and files, which are the caller's from now on. */
  take() {
    const attached = this.#attached;
    this.#attached = { images: [], files: [] };
    this.#show();
    this.#tell("");
    return attached;
  }

  #onPaste(event) {
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    // A program may add a picture to a text, and the name to a file.
    const isText = text && ![...files].some(({ name }) => text.includes(name));
    if (!files.length || isText || !isChatSeen()) return;
    event.preventDefault();
    this.#add(files);
  }

  #onDrag(event) {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (!isChatSeen()) event.dataTransfer.dropEffect = "none";
    else $("drop").hidden = false;
    setText($("drop"), `Drop ${refusal() ? "" : "images, "}texts or PDFs here`);
  }

  #onDrop(event) {
    if ($("drop").hidden) return;
    event.preventDefault();
    $("drop").hidden = true;
    this.#add(event.dataTransfer.files);
  }

  #add(files) {
    const added = [...files];
    this.#read = this.#read.then(() => this.#readAll(added));
  }

  async #readAll(files) {
    const news = new Map(); // names, by what has become of them
    for (const file of files) {
      const outcome = await this.#readOne(file).then(() => "added", ({ message }) => `left out: ${message}`);
      news.set(outcome, [...news.get(outcome) ?? [], nameOf(file)]);
      this.#show();
    }
    this.#tell([...news].map(([outcome, names]) => `${listed(names)} ${outcome}.`).join(" "));
  }

  /** Rejects with the reason if it cannot be sent. */
  async #readOne(file) {
    const image = file.type.startsWith("image/") && await readImage(file).catch(() => null);
    if (image && refusal()) throw new Error(refusal());
    const { images, files } = this.#attached;
    const all = [...this.#sent(), ...images, ...files];
    const num = all.filter((one) => Boolean(image) === one instanceof Blob).length;
    const most = image ? modelOf(settings.model)?.max_images ?? MAX_IMAGES : MAX_FILES;
    if (num >= most) throw new Error(`a conversation takes ${most} ${image ? "images" : "files"} at most`);
    const numBytes = all.reduce((sum, one) => sum + (one.blob ?? one).size, (image || file).size);
    if (numBytes > MAX_BYTES) throw new Error(`a conversation takes ${MAX_BYTES >> 20} MiB at most`);
    const read = image || await readFile(file);
    // Those of before may have been sent meanwhile.
    if (image) this.#attached.images.push(read);
    else this.#attached.files.push(read);
  }

  #show() {
    $("attached").replaceChildren(...removable(this.#attached, (i) => {
      this.#show();
      const buttons = $("attached").querySelectorAll(".icon");
      this.#tell(`Removed, ${buttons.length || "none"} left.`);
      (buttons[i] ?? buttons[i - 1] ?? $("prompt")).focus();
    }));
  }

  #tell(text) {
    setText($("attached-news"), text);
  }
}

/** Why the chosen model gets no images; empty if it does. */
function refusal() {
  const takes = takesImages(modelOf(settings.model));
  const name = settings.model || "this model";
  if (takes === undefined) return `The server does not say that ${name} takes images`;
  return takes ? "" : `${name} takes text only`;
}

const listed = (names) => (names.length > 3 ? `${names.length} files` : names.join(", "));

const isChatSeen = () => !$("chat").hidden && !document.querySelector("dialog[open]");
