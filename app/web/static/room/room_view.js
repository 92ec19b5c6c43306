// The machine room: what the engine does, four times a second.

import { watchEngine } from "../api.js";
import { $, h, setText } from "../dom.js";
import { Feed } from "../feed.js";
import { areModelsListed, modelOf, onModels, percent, refreshModels, wordOf } from "../models.js";
import { onChange, settings } from "../settings.js";
import { BlockMap, BlockOwners, EMPTY } from "./block_map.js";
import { History } from "./history.js";
import { Lanes } from "./lanes.js";
import { ModelsPanel } from "./models_panel.js";
import { assignHues, legendItem } from "./paint.js";
import { Queue } from "./queue.js";
import { Tiles } from "./tiles.js";

// Milliseconds without a frame, after which that is said.
const LATE = 2500;
// Milliseconds between two looks at what the models do, of which only changes of their states are told.
const REFRESH = 2000;

const STATES = ["waiting", "prefill", "decode", "preempted"];
const BLOCKS = [
  ["used", "of one request, in its colour"],
  ["shared", "shared by several"],
  ["cached", "cached for later"],
  ["empty", "free"],
];

export class RoomView {
  #history = new History();
  #tiles = new Tiles($("tiles"));
  #lanes = new Lanes($("lanes"), $("no-lanes"), (id) => this.#select(id));
  #queue = new Queue($("queue"), $("no-queue"));
  #map = new BlockMap($("blocks"));
  #owners = null;
  #selected = null;
  #lateTimer = null;
  #counts = new Map();
  #panel = new ModelsPanel();
  #refreshTimer = null;
  #isWatched = false;
  #feed = new Feed(
    (signal) => watchEngine(settings.model, signal),
    (frame) => this.#show(frame),
    (state, status) => {
      this.#showState(state);
      if (status === 403) this.#panel.refusal = state;
    },
  );

  constructor() {
    for (const state of STATES) $("lanes-legend").append(legendItem(state, state));
    for (const [name, text] of BLOCKS) {
      const count = h("b", { text: "0" });
      this.#counts.set(name, count);
      $("blocks-legend").append(legendItem(`block-${name}`, text, count));
    }
    $("blocks").addEventListener("pointermove", (event) => this.#point(event));
    $("blocks").addEventListener("pointerleave", () => this.#select(null));
    $("absent-load").addEventListener("click", () => this.#panel.move("load", settings.model));
    onChange(() => {
      this.#panel.refusal = "";
      this.#end();
      this.#follow();
    });
    onModels(() => {
      this.#panel.show();
      this.#follow();
    });
  }

  /** Watch, or not: nothing is collected for a view that is not seen. */
  watch(isWatched) {
    if (isWatched === this.#isWatched) return;
    this.#isWatched = isWatched;
    clearInterval(this.#refreshTimer);
    if (isWatched) {
      this.#refreshTimer = setInterval(() => refreshModels().catch(() => {}), REFRESH);
      this.#follow();
    } else this.#end();
  }

  /** Watch the chosen model, as long as it is there. */
  #follow() {
    if (!this.#isWatched || !areModelsListed()) return;
    const card = modelOf(settings.model);
    const word = wordOf(card);
    const isAbsent = ["unloaded", "loading", "failed"].includes(word);
    $("absent").hidden = !isAbsent;
    $("live").hidden = isAbsent;
    if (isAbsent) {
      const what = { unloaded: "is not loaded", loading: `is being loaded: ${percent(card)} %`, failed: "could not be loaded" };
      setText($("absent-text"), `${card.id} ${what[word]}.`);
      if (word === "loading" && document.activeElement === $("absent-load")) $("room").focus();
      $("absent-load").hidden = word === "loading";
      this.#end();
      this.#showState("");
    } else if (!this.#feed.isRunning) {
      this.#history = new History();
      this.#feed.start();
    }
  }

  #end() {
    this.#feed.stop();
    clearTimeout(this.#lateTimer);
  }

  #show(frame) {
    const time = performance.now() / 1000;
    this.#history.add(frame, time);
    assignHues(frame.running.map(({ id }) => id));
    this.#tiles.show(this.#history, time);
    this.#lanes.show(this.#history, time);
    this.#queue.show(frame);
    this.#owners = new BlockOwners(frame);
    this.#showBlocks(frame);
    this.#drawMap();
    if (frame.unhealthy_reason) this.#showState(`Unhealthy: ${frame.unhealthy_reason}.`);
    clearTimeout(this.#lateTimer);
    this.#lateTimer = setTimeout(() => this.#showState("No news: the engine is in a long step."), LATE);
  }

  #showState(text) {
    setText($("feed-state"), text);
  }

  #showBlocks(frame) {
    for (const [name, count] of Object.entries(this.#owners.counts())) {
      setText(this.#counts.get(name), String(count));
    }
    const { num_blocks: numBlocks, block_size: size } = frame.stats;
    const partly = frame.is_map_whole ? "" : "; too many requests to show all of them";
    setText($("blocks-size"), `${numBlocks} of ${size} tokens${partly}`);
  }

  #drawMap() {
    if (this.#owners) this.#map.draw(this.#owners, this.#selected);
  }

  #point({ offsetX, offsetY }) {
    const cell = this.#map.blockAt(offsetX, offsetY);
    if (!cell || cell.first >= (this.#owners?.numBlocks ?? 0)) return this.#select(null);
    const owners = this.#owners.of.get(cell.first) ?? [];
    const what = owners.length
      ? `${owners.length > 1 ? "shared by" : "of"} ${owners.map((id) => `#${id}`).join(", ")}`
      : this.#owners.stateOf(cell.first) === EMPTY ? "free" : "cached";
    const name = cell.number > 1 ? `Blocks from ${cell.first}` : `Block ${cell.first}`;
    setText($("blocks-about"), `${name}: ${what}.`);
  }

  #select(id) {
    this.#selected = id;
    this.#drawMap();
    setText($("blocks-about"), id === null ? "Point at a block, or at a request, to see who shares what." : this.#sharing(id));
  }

  #sharing(id) {
    const owned = [...(this.#owners?.of.values() ?? [])].filter((ids) => ids.includes(id));
    const others = new Set(owned.flat().filter((other) => other !== id));
    const numShared = owned.filter((ids) => ids.length > 1).length;
    const shared = numShared ? `, ${numShared} of them shared with ${[...others].map((o) => `#${o}`).join(", ")}` : "";
    return `Request #${id} uses ${owned.length} blocks${shared}.`;
  }
}
