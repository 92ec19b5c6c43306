// Elements without HTML: texts stay texts.

/** Make an element. `props` are attributes, but for `on` (listeners), `text` and `value`. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [type, listener] of Object.entries(value)) element.addEventListener(type, listener);
    } else if (name === "text") element.textContent = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** An icon of the page's sprite. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon, whose label is read aloud and shown as a tooltip. */
export function iconButton(name, label, onClick) {
  return h(
    "button",
    { type: "button", class: "icon", "aria-label": label, title: label, on: { click: onClick } },
    icon(name),
  );
}

/** Change a text only if it differs: nothing is laid out, or read aloud, for what is the same. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show an item for each key, in that order; `items` are those shown so far, by key, each with its `element`. */
export function arrange(list, items, keys, make) {
  for (const [key, { element }] of items) {
    if (keys.includes(key)) continue;
    element.remove();
    items.delete(key);
  }
  keys.forEach((key, i) => {
    if (!items.has(key)) items.set(key, make(key));
    const { element } = items.get(key);
    if (list.children[i] !== element) list.insertBefore(element, list.children[i] ?? null);
  });
}

/** Copy a text; whether that went well. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

/** Copy a text where the clipboard API is not allowed, or not there, as on a page that came over plain HTTP. */
function copySelected(text) {
  const focused = document.activeElement;
  const area = h("textarea", { class: "sr-only", value: text, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused.focus({ preventScroll: true });
  return isCopied;
}

/** A button that copies what `text()` returns, unless that is null, and says so for a moment. */
export function copyButton(label, text, name = "copy") {
  const button = iconButton(name, label, async () => {
    const copied = text();
    if (copied === null || !await copyText(copied)) return;
    button.replaceChildren(icon("check"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon(name));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}
