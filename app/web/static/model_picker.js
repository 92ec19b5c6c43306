// The choice of a model in the page's head, and what is read aloud of all of them.

import { $, h, setText } from "./dom.js";
import { bytesOf, factsOf, gib, models, onModels, refreshModels, stateText, wordOf } from "./models.js";
import { change, onChange, settings } from "./settings.js";

export class ModelPicker {
  #select = $("model");
  #compare = $("compare");
  #words = new Map(); // by model, what was read aloud last

  constructor() {
    this.#select.addEventListener("change", () => change({ model: this.#select.value }));
    this.#compare.addEventListener("change", () => change({ compare: this.#compare.value }));
    this.#select.addEventListener("focus", () => refreshModels().catch(() => {}));
    onChange(() => this.#showChoice());
    onModels(() => this.#show());
  }

  #show() {
    const options = [...this.#select.options];
    const cards = models();
    // The list may be open: what is the same stays.
    if (cards.map(({ id }) => id).join() !== options.map(({ value }) => value).join()) {
      this.#select.replaceChildren(...cards.map(({ id }) => h("option", { value: id })));
      this.#compare.replaceChildren(h("option", { value: "", text: "Compare with …" }),
        ...cards.map(({ id }) => h("option", { value: id, text: `and ${id}` })));
      $("comparing").hidden = cards.length < 2;
    }
    cards.forEach((card, i) => setText(this.#select.options[i], lineOf(card)));
    if (cards.length && !cards.some(({ id }) => id === settings.model)) change({ model: cards[0].id });
    this.#showChoice();
    this.#announce();
  }

  #showChoice() {
    this.#select.value = settings.model;
    this.#compare.value = settings.compare;
    if (this.#compare.selectedIndex < 0) this.#compare.value = "";
    for (const option of this.#compare.options) option.hidden = option.value !== "" && option.value === settings.model;
    this.#select.title = this.#select.selectedOptions[0]?.textContent ?? "";
  }

  #announce() {
    const news = models().filter((card) => !card.parent && this.#words.has(card.id) && this.#words.get(card.id) !== wordOf(card));
    if (news.length) setText($("model-news"), news.map((card) => `${card.id}: ${wordOf(card)}.`).join(" "));
    this.#words = new Map(models().map((card) => [card.id, wordOf(card)]));
  }
}

const lineOf = (card) =>
  card.parent ? `${card.parent} : ${card.id}` : [card.id, stateText(card), card.memory && gib(bytesOf(card)), ...factsOf(card)].filter(Boolean).join(" · ");
