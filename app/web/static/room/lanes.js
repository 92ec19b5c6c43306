// Requests as lanes: a line each, along which time runs and whose colours are states.

import { arrange, h, setText } from "../dom.js";
import { SPAN, stateOf } from "./history.js";
import { color, fitted, hueOf } from "./paint.js";

// More are counted only.
const MAX_LANES = 48;
const HEIGHT = 14;

export class Lanes {
  #element;
  #empty;
  #onSelect;
  #rows = new Map(); // by the request's id

  /** `onSelect` gets the id of the request that is pointed at, or null. */
  constructor(element, empty, onSelect) {
    this.#element = element;
    this.#empty = empty;
    this.#onSelect = onSelect;
  }

  show(history, time) {
    const lanes = [...history.lanes.values()].sort(inOrder).slice(0, MAX_LANES);
    arrange(this.#element, this.#rows, lanes.map(({ id }) => id), (id) => new Row(id, this.#onSelect));
    for (const lane of lanes) this.#rows.get(lane.id).show(lane, time);
    this.#empty.hidden = lanes.length > 0;
  }
}

/** Those that run first, then those that wait, then those that have ended; the latest first. */
const inOrder = (a, b) => rank(a) - rank(b) || b.id - a.id;
const rank = ({ hasEnded, latest }) => (hasEnded ? 2 : latest.status === "waiting" ? 1 : 0);

class Row {
  #canvas = h("canvas", { "aria-hidden": "true" });
  #name = h("button", { type: "button", class: "name" });
  #swatch = h("span", { class: "swatch" });
  #state = h("span", { class: "state" });
  #progress = h("span", { class: "progress" });

  constructor(id, onSelect) {
    this.#name.append(this.#swatch, `#${id}`);
    this.element = h("li", {
      on: {
        pointerenter: () => onSelect(id),
        pointerleave: () => onSelect(null),
        focusin: () => onSelect(id),
        focusout: () => onSelect(null),
      },
    }, this.#name, this.#state, this.#canvas, this.#progress);
  }

  show(lane, time) {
    const state = lane.hasEnded ? "ended" : stateOf(lane.latest);
    this.element.dataset.state = state;
    this.#swatch.style.setProperty("--swatch", `var(--${hueOf(lane.id)})`);
    setText(this.#state, state);
    setText(this.#progress, progressOf(lane.latest));
    const width = this.#canvas.clientWidth;
    if (!width) return;
    const context = fitted(this.#canvas, width, HEIGHT);
    const x = (t) => width * (1 - (time - t) / SPAN);
    for (const span of lane.spans) {
      const from = Math.max(0, x(span.from));
      context.globalAlpha = lane.hasEnded ? 0.45 : 1;
      context.fillStyle = color(span.state);
      context.fillRect(from, 0, Math.max(1.5, x(span.to) - from), HEIGHT);
    }
  }
}

function progressOf(request) {
  const numRead = Math.min(request.num_computed_tokens, request.num_prompt_tokens);
  const parts = [
    request.num_output_tokens ? `prompt ${request.num_prompt_tokens}` : `prompt ${numRead}/${request.num_prompt_tokens}`,
    request.num_cached_tokens ? `${request.num_cached_tokens} cached` : "",
    request.num_output_tokens ? `output ${request.num_output_tokens}` : "",
    request.num_preemptions ? `preempted ${request.num_preemptions}×` : "",
    request.adapter ?? "",
    request.num_choices > 1 ? `${request.num_choices} choices` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}
