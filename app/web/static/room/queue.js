// The queue in the order of service; the longer its bar, the earlier a request is due.

import { h, setText } from "../dom.js";

const MAX_ROWS = 24;
// Classes are 0 (high), 1 and 2 (low); age lowers them without limit.
const LOWEST = 2;
const SPAN = 4;

export class Queue {
  #element;
  #empty;

  constructor(element, empty) {
    this.#element = element;
    this.#empty = empty;
  }

  show(frame) {
    const shown = frame.waiting.slice(0, MAX_ROWS);
    const numLeft = frame.stats.num_waiting - shown.length;
    while (this.#element.children.length > shown.length + (numLeft > 0)) this.#element.lastElementChild.remove();
    shown.forEach((request, i) => this.#showRow(this.#row(i), request));
    if (numLeft > 0) {
      const row = this.#row(shown.length);
      row.className = "more";
      row.replaceChildren(`and ${numLeft} more`);
    }
    this.#empty.hidden = frame.stats.num_waiting > 0;
  }

  #row(i) {
    return this.#element.children[i] ?? this.#element.appendChild(h("li"));
  }

  #showRow(row, request) {
    if (!row.querySelector("meter")) {
      row.className = "";
      row.replaceChildren(h("span", { class: "name" }), h("span", { class: "class" }),
        h("meter", { min: 0, max: SPAN }), h("span", { class: "progress" }));
    }
    const [name, base, meter, facts] = row.children;
    setText(name, `#${request.id}`);
    setText(base, request.priority);
    base.dataset.priority = request.priority;
    meter.value = Math.min(SPAN, LOWEST - request.effective_priority);
    const priority = request.effective_priority.toFixed(1);
    meter.setAttribute("aria-label", `aged priority ${priority}, less is earlier`);
    const back = request.num_preemptions ? ` · preempted ${request.num_preemptions}×` : "";
    setText(facts, `aged ${priority} · ${request.age.toFixed(1)} s · prompt ${request.num_prompt_tokens}${back}`);
  }
}
