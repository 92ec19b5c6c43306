// Figures of this moment, each with its last half minute where that says something.

import { h, setText } from "../dom.js";
import { gib } from "../models.js";
import { SPAN } from "./history.js";
import { color, fitted } from "./paint.js";

const HEIGHT = 28;

const TILES = [
  { name: "output", title: "Output", unit: "tokens/s", line: "output" },
  { name: "prefill", title: "Prefill", unit: "tokens/s", line: "prefill" },
  { name: "first", title: "First token", unit: "s, median", detail: true },
  { name: "hits", title: "Prefix cache hits", unit: "%", detail: true },
  { name: "running", title: "Running", unit: "", detail: true },
  { name: "pool", title: "KV blocks in use", unit: "%", detail: true },
  { name: "store", title: "KV cache on disk", unit: "", detail: true },
];

export class Tiles {
  #tiles = new Map();

  constructor(element) {
    for (const { name, title, unit, line, detail } of TILES) {
      const tile = {
        value: h("span", { class: "value", text: "–" }),
        unit: h("span", { class: "unit", text: unit }),
        below: line ? h("canvas", { "aria-hidden": "true" }) : detail ? h("span", { class: "detail" }) : null,
        line,
      };
      tile.element = h("div", { class: "tile" }, h("dt", { text: title }), h("dd", {}, tile.value, " ", tile.unit, tile.below));
      this.#tiles.set(name, tile);
      element.append(tile.element);
    }
  }

  show(history, time) {
    const { frame } = history.points.at(-1);
    const { stats, counts } = frame;
    const rate = history.rates.at(-1);
    this.#set("output", rate.output.toFixed(rate.output < 100 ? 1 : 0));
    this.#set("prefill", rate.prefill.toFixed(0));
    const first = counts.first_tokens;
    this.#set("first", first ? first.p50.toFixed(2) : "–", first ? `95 % within ${first.p95.toFixed(2)} s` : "none since you watch");
    const hits = history.hitRate();
    this.#set("hits", hits === null ? "–" : (100 * hits).toFixed(0), `of prompt tokens · ${stats.num_evictions} evicted`);
    this.#set("running", `${stats.num_running} of ${frame.max_num_seqs}`,
      `${stats.num_waiting} waiting · ${stats.num_preemptions} preempted`);
    const numUsed = stats.num_blocks - stats.num_free_blocks;
    this.#set("pool", ((100 * numUsed) / stats.num_blocks).toFixed(0), `${numUsed} of ${stats.num_blocks}`);
    this.#showStore(stats.store);
    for (const tile of this.#tiles.values()) if (tile.line) drawLine(tile.below, history.rates, tile.line, time);
  }

  /** What outlives the server; null where nothing does. */
  #showStore(store) {
    this.#tiles.get("store").element.hidden = !store;
    if (!store) return;
    this.#set("store", gib(store.num_bytes),
      `${store.num_restored_tokens} tokens hit · ${gib(store.bytes_read)} read · ${gib(store.bytes_written)} written` +
      (store.num_unsaved ? ` · ${store.num_unsaved} waiting` : ""));
  }

  #set(name, value, detail) {
    const tile = this.#tiles.get(name);
    setText(tile.value, value);
    if (detail !== undefined) setText(tile.below, detail);
  }
}

function drawLine(canvas, rates, name, time) {
  const width = canvas.clientWidth;
  if (!width) return;
  const context = fitted(canvas, width, HEIGHT);
  const highest = Math.max(1, ...rates.map((rate) => rate[name]));
  context.beginPath();
  for (const rate of rates) {
    const x = width * (1 - (time - rate.time) / SPAN);
    context.lineTo(x, HEIGHT - 2 - (HEIGHT - 4) * (rate[name] / highest));
  }
  context.strokeStyle = color("accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
}
