// The models with their memory, to be loaded and unloaded.

import { move } from "../api.js";
import { $, arrange, h, setText } from "../dom.js";
import { bytesOf, factsOf, gib, models, percent, refreshModels, stateText, wordOf } from "../models.js";
import { change, settings } from "../settings.js";
import { legendItem } from "./paint.js";

const PARTS = [
  ["weights", "prefill", "weights"],
  ["kv_cache", "decode", "KV cache"],
  ["states", "waiting", "states"],
  ["adapters", "preempted", "adapters"],
];

export class ModelsPanel {
  #rows = new Map(); // by model
  #refusal = "";

  constructor() {
    for (const [, color, text] of PARTS) $("models-legend").append(legendItem(color, text));
  }

  /** Why the client may not load and unload; empty if nothing is known against it. */
  set refusal(text) {
    this.#refusal = text;
    setText($("models-refusal"), text);
    $("absent-load").disabled = text !== "";
    this.show();
  }

  /** Let a model be loaded, or unloaded. */
  async move(act, id) {
    setText($("models-fault"), "");
    try {
      await move(act, id);
      await refreshModels();
    } catch (error) {
      if (error.status === 403) this.refusal = `You cannot load and unload models: ${error.message}.`;
      else setText($("models-fault"), `${id}: ${error.message}`);
    }
  }

  show() {
    const cards = models().filter((card) => wordOf(card) && !card.parent);
    const sizes = cards.map(bytesOf);
    const most = Math.max(...sizes, 1);
    $("models-section").hidden = !cards.length;
    arrange($("models"), this.#rows, cards.map(({ id }) => id), (id) => new Row(id, (act) => this.move(act, id)));
    for (const card of cards) this.#rows.get(card.id).show(card, most, this.#refusal !== "");
    setText($("models-size"), `${gib(sizes.reduce((a, b) => a + b, 0))} in use`);
  }
}

class Row {
  #name;
  #state = h("span", { class: "state" });
  #parts = PARTS.map(([, color]) => {
    const part = h("span");
    part.style.background = `var(--${color})`;
    return part;
  });
  #bar = h("div", { class: "memory", "aria-hidden": "true" }, ...this.#parts);
  #load = h("progress", { max: 100 });
  #about = h("span", { class: "about" });
  #act = "";
  #button = h("button", { type: "button", "aria-describedby": "models-refusal" });

  constructor(id, onAct) {
    this.#name = h("button", { type: "button", class: "name", text: id, title: id, on: { click: () => change({ model: id }) } });
    this.#load.setAttribute("aria-label", `Load of ${id}`);
    this.#button.addEventListener("click", () => onAct(this.#act));
    this.element = h("li", {}, this.#name, this.#state, h("div", {}, this.#bar, this.#load), this.#about, this.#button);
  }

  show(card, most, isRefused) {
    const word = wordOf(card);
    this.element.dataset.state = word;
    if (card.id === settings.model) this.#name.setAttribute("aria-current", "true");
    else this.#name.removeAttribute("aria-current");
    setText(this.#state, stateText(card));
    PARTS.forEach(([name], i) => { this.#parts[i].style.width = `${(100 * (card.memory?.[name] ?? 0)) / most}%`; });
    this.#load.hidden = word !== "loading";
    this.#load.value = percent(card);
    this.#bar.hidden = !card.memory;
    setText(this.#about, lineOf(card));
    this.#act = word === "loaded" || word === "loading" ? "unload" : "load";
    const label = this.#act === "load" ? "Load" : "Unload";
    setText(this.#button, label);
    this.#button.setAttribute("aria-label", `${label} ${card.id}`);
    this.#button.disabled = isRefused;
  }
}

function lineOf(card) {
  const parts = card.memory ? PARTS.filter(([name]) => card.memory[name]) : [];
  return [
    card.status.reason,
    parts.map(([name, , text]) => `${text} ${gib(card.memory[name])}`).join(", "),
    card.in_flight && `${card.in_flight} in flight`,
    ...factsOf(card),
  ].filter(Boolean).join(" · ");
}
