// The images that go with the next message: picked, pasted or dropped.

import { $, h, iconButton, setText } from "../dom.js";
import { modelOf, onModels, takesImages } from "../models.js";
import { onChange, settings } from "../settings.js";
import { readImage, thumbnails } from "./messages/images.js";

// Of a conversation, where the server does not say how many a request may have.
const MAX_IMAGES = 32;

export class Attachments {
  #images = [];
  #numSent;
  #read = Promise.resolve();

  /** `numSent()`: how many images the conversation has without these. */
  constructor(numSent) {
    this.#numSent = numSent;
    const files = $("image-files");
    $("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.#add(files.files);
      files.value = ""; // the same ones may be picked again
    });
    document.addEventListener("paste", (event) => this.#onPaste(event));
    document.addEventListener("dragover", (event) => this.#onDrag(event));
    document.addEventListener("dragleave", ({ relatedTarget }) => { $("drop").hidden ||= !relatedTarget; });
    document.addEventListener("drop", (event) => this.#onDrop(event));
    for (const follow of [onModels, onChange]) follow(() => { $("attach").hidden = refusal() !== ""; });
  }

  /** Wait for those that are still read; return whether there is something to send, with `text`, to the chosen model. */
  async isReady(text) {
    await this.#read;
    const fault = this.#images.length && refusal();
    if (fault) this.#tell(fault);
    return !fault && (text() !== "" || this.#images.length > 0);
  }

  /** The images, which are the caller's from now on. */
  take() {
    const images = this.#images;
    this.#images = [];
    this.#show();
    this.#tell("");
    return images;
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
    setText($("drop"), refusal() || "Drop images here");
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
    const news = [refusal()];
    const most = modelOf(settings.model)?.max_images ?? MAX_IMAGES;
    let numAdded = 0;
    for (const [i, file] of news[0] ? [] : files.entries()) {
      if (this.#numSent() + this.#images.length >= most) {
        news.push(`A conversation takes ${most} images at most: ${files.length - i} left out.`);
        break;
      }
      try {
        this.#images.push(await readImage(file));
        numAdded += 1;
        this.#show();
      } catch {
        news.push(`${file.name} cannot be read as an image.`);
      }
    }
    if (numAdded) news.unshift(`${counted(numAdded)} added.`);
    this.#tell(news.filter(Boolean).join(" "));
  }

  #remove(image) {
    const i = this.#images.indexOf(image);
    this.#images.splice(i, 1);
    this.#show();
    this.#tell(`Image removed, ${this.#images.length || "none"} left.`);
    const buttons = $("attached").querySelectorAll(".icon");
    (buttons[i] ?? buttons[i - 1] ?? $("prompt")).focus();
  }

  #show() {
    const images = this.#images;
    $("attached").replaceChildren(...thumbnails(images).map((thumbnail, i) => h("li", {}, thumbnail,
      iconButton("delete", `Remove image ${i + 1} of ${images.length}`, () => this.#remove(images[i])))));
  }

  #tell(text) {
    setText($("image-news"), text);
  }
}

/** Why the chosen model gets no images; empty if it does. */
function refusal() {
  const takes = takesImages(modelOf(settings.model));
  const name = settings.model || "this model";
  if (takes === undefined) return `The server does not say that ${name} takes images.`;
  return takes ? "" : `${name} takes text only.`;
}

const counted = (number) => `${number} image${number === 1 ? "" : "s"}`;

const isChatSeen = () => !$("chat").hidden && !document.querySelector("dialog[open]");
