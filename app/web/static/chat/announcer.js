// What a screen reader reads aloud while a message streams: whole sentences, and not too often.

import { setText } from "../dom.js";

// Milliseconds, and characters: who wants the whole of a long message reads it in the list.
const INTERVAL = 3000;
const MAX_LENGTH = 400;

export class Announcer {
  #element;
  #numSaid = 0;
  #last = 0;

  constructor(element) {
    this.#element = element;
  }

  say(text) {
    setText(this.#element, text);
  }

  begin(numSaid) {
    this.#numSaid = numSaid;
    this.#last = performance.now();
    this.say("The model responds.");
  }

  update(text) {
    if (performance.now() - this.#last < INTERVAL) return;
    const end = text.slice(this.#numSaid).search(/[.!?:]\s[^.!?:]*$|\n[^\n]*$/) + 1;
    if (!end) return;
    this.#speak(text.slice(this.#numSaid, this.#numSaid + end));
    this.#numSaid += end;
  }

  end(text, outcome) {
    this.#speak(`${text.slice(this.#numSaid)} ${outcome}`);
    this.#numSaid = text.length;
  }

  #speak(text) {
    this.#last = performance.now();
    this.say(text.length > MAX_LENGTH ? `${text.slice(0, MAX_LENGTH)} …` : text);
  }
}
