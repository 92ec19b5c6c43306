// Where the user writes the next message, or picks one of those that are suggested.

import { $, h } from "../dom.js";
import { Attachments } from "./attachments.js";

const SUGGESTIONS = [
  "Explain continuous batching in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Compare HTTP/1.1 and HTTP/2 in a table.",
];

export class Composer {
  #prompt = $("prompt");
  #attachments;

  /** `send(text, attached)`; `canSend()`: no response is awaited; `sent()`: what the conversation has. */
  constructor({ send, canSend, sent }) {
    this.#attachments = new Attachments(sent);
    $("composer").addEventListener("submit", async (event) => {
      event.preventDefault();
      const text = () => this.#prompt.value.trim();
      if (!await this.#attachments.isReady(text) || !canSend()) return;
      const message = [text(), this.#attachments.take()];
      this.fill("");
      send(...message);
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("composer").requestSubmit();
    });
    this.#prompt.addEventListener("input", () => this.#fit());
    $("suggestions").append(...SUGGESTIONS.map((text) =>
      h("li", {}, h("button", { type: "button", text, on: { click: () => send(text) } }))));
  }

  fill(text) {
    this.#prompt.value = text;
    this.#fit();
  }

  /** Show that the conversation is answered or not; `lostFocus`: what had the focus is gone. */
  swapButtons(isRunning, lostFocus) {
    const isSwapped = $("stop").hidden === isRunning;
    const takesFocus = lostFocus || (isSwapped && [$("stop"), $("send")].includes(document.activeElement));
    $("stop").hidden = !isRunning;
    $("send").hidden = isRunning;
    if (takesFocus) $(isRunning ? "stop" : "prompt").focus();
  }

  #fit() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${this.#prompt.scrollHeight}px`;
  }
}
