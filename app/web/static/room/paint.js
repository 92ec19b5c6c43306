// Drawing in the colours of the theme, on canvases and off them.

import { h } from "../dom.js";

/** Fit a canvas to its size on the page; return its context in CSS pixels, cleared. */
export function fitted(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const resolvedColors = new Map();
const forget = () => resolvedColors.clear();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
new MutationObserver(forget).observe(document.documentElement, { attributeFilter: ["data-theme"] });

/** A colour of the style sheet by its name; looked up once for each theme. */
export function color(name) {
  if (!resolvedColors.has(name)) resolvedColors.set(name, resolved(name));
  return resolvedColors.get(name);
}

/** `light-dark()` is resolved only where it is used as a colour. */
function resolved(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const NUM_HUES = 8;
const hues = new Map(); // of requests that run, by their ids

/** Give each request that runs the colour that the fewest others have. */
export function assignHues(ids) {
  for (const id of hues.keys()) if (!ids.includes(id)) hues.delete(id);
  const numUsers = new Array(NUM_HUES).fill(0);
  for (const hue of hues.values()) numUsers[hue] += 1;
  for (const id of ids) {
    if (hues.has(id)) continue;
    const hue = numUsers.indexOf(Math.min(...numUsers));
    numUsers[hue] += 1;
    hues.set(id, hue);
  }
}

/** The name of a request's own colour; that of nothing, unless it runs. */
export const hueOf = (id) => (hues.has(id) ? `hue-${hues.get(id)}` : "block-empty");

/** An entry of a legend, with the colour of that name. */
export function legendItem(name, text, count = null) {
  const swatch = h("span", { class: "swatch" });
  swatch.style.setProperty("--swatch", `var(--${name})`);
  return h("li", {}, swatch, count, count ? " " : null, text);
}
