// The block pool as a map: one cell for each block, or for several where there are many.

import { color, fitted, hueOf } from "./paint.js";

export const EMPTY = -1;
export const CACHED = -2;
export const SHARED = -3;

// CSS pixels.
const MAX_HEIGHT = 260;
const SIZES = [22, 18, 14, 12, 10, 8, 6, 5, 4, 3];

/** Which requests use which blocks: `of` has their ids by block. */
export class BlockOwners {
  #isEmpty;

  constructor(frame) {
    this.numBlocks = frame.stats.num_blocks;
    this.of = new Map();
    for (const { id, blocks } of frame.running) {
      for (const block of spread(blocks)) {
        if (this.of.has(block)) this.of.get(block).push(id);
        else this.of.set(block, [id]);
      }
    }
    this.#isEmpty = new Uint8Array(this.numBlocks);
    for (const block of spread(frame.empty_blocks)) this.#isEmpty[block] = 1;
  }

  /** EMPTY, CACHED, SHARED, or the id of the only request that uses it. */
  stateOf(block) {
    const owners = this.of.get(block);
    if (owners) return owners.length > 1 ? SHARED : owners[0];
    return this.#isEmpty[block] ? EMPTY : CACHED;
  }

  counts() {
    const owned = [...this.of.values()];
    const shared = owned.filter((ids) => ids.length > 1).length;
    const empty = this.#isEmpty.reduce((sum, isEmpty) => sum + isEmpty, 0);
    return { used: owned.length - shared, shared, empty, cached: this.numBlocks - owned.length - empty };
  }
}

/** Runs of first block and length, one after the other. */
function* spread(runs) {
  for (let i = 0; i < runs.length; i += 2) {
    for (let block = runs[i]; block < runs[i] + runs[i + 1]; block++) yield block;
  }
}

export class BlockMap {
  #canvas;
  #layout = null;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  draw(owners, selected) {
    const width = this.#canvas.clientWidth;
    if (!width) return;
    const layout = layoutOf(owners.numBlocks, width);
    this.#layout = layout;
    const context = fitted(this.#canvas, width, layout.height);
    const { size, columns, perCell } = layout;
    const gap = size > 5 ? 1.5 : size > 3 ? 1 : 0;
    for (let cell = 0; cell * perCell < owners.numBlocks; cell++) {
      const state = stateOfCell(owners, cell * perCell, perCell);
      const isLit = selected === null || isOwnedBy(owners, cell * perCell, perCell, selected);
      context.globalAlpha = isLit ? 1 : 0.18;
      context.fillStyle = color(colorOf(state));
      const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
      context.fillRect(x, y, size - gap, size - gap);
    }
  }

  /** The first block of the cell at a point of the canvas, and how many there are in it. */
  blockAt(x, y) {
    if (!this.#layout) return null;
    const { size, columns, perCell } = this.#layout;
    const column = Math.floor(x / size);
    if (column >= columns) return null;
    return { first: (Math.floor(y / size) * columns + column) * perCell, number: perCell };
  }
}

function layoutOf(numBlocks, width) {
  for (const size of SIZES) {
    const columns = Math.floor(width / size);
    const height = Math.ceil(numBlocks / columns) * size;
    if (height <= MAX_HEIGHT) return { size, columns, height, perCell: 1 };
  }
  const size = SIZES.at(-1);
  const columns = Math.floor(width / size);
  const perCell = Math.ceil(numBlocks / (columns * Math.floor(MAX_HEIGHT / size)));
  return { size, columns, perCell, height: Math.ceil(numBlocks / perCell / columns) * size };
}

/** The state of a cell's first block that is used, or else cached. */
function stateOfCell(owners, first, number) {
  let found = EMPTY;
  for (let block = first; block < Math.min(first + number, owners.numBlocks); block++) {
    const state = owners.stateOf(block);
    if (state >= 0 || state === SHARED) return state;
    if (state === CACHED) found = CACHED;
  }
  return found;
}

function isOwnedBy(owners, first, number, id) {
  for (let block = first; block < first + number; block++) {
    if (owners.of.get(block)?.includes(id)) return true;
  }
  return false;
}

function colorOf(state) {
  if (state >= 0) return hueOf(state);
  return { [EMPTY]: "block-empty", [CACHED]: "block-cached", [SHARED]: "block-shared" }[state];
}
