// The servers of tools in the dialog of settings.

import { h, iconButton, setText } from "../dom.js";
import { settings, tokens } from "../settings.js";
import { check } from "./tools.js";

/** Rows for the listed servers; `values()` returns {urls, tokens}. */
export function serverFields() {
  const list = h("ul", { class: "servers" });
  const add = (url = "", token = "") => list.append(row(url, token));
  for (const url of settings.mcp_servers) add(url, tokens()[url]);
  const button = h("button", { type: "button", text: "Add a server", on: { click: () => {
    add();
    list.lastElementChild.querySelector("input").focus();
  } } });
  const element = h("div", { class: "field" },
    h("p", { class: "hint", text: "Their tools are offered to the model. Each call is shown, and made once you allow it." }),
    list, h("div", { class: "actions" }, button));
  const values = () => {
    const pairs = [...list.children].map((item) => [...item.querySelectorAll("input")].map(({ value }) => value.trim()));
    const filled = new Map(pairs.filter(([url]) => url));
    return { urls: [...filled.keys()], tokens: Object.fromEntries([...filled].filter(([, token]) => token)) };
  };
  return { element, values };
}

function row(url, token = "") {
  const address = h("input", { type: "url", pattern: "https?://.+", title: "An address with http or https",
    "aria-label": "Address of the server", placeholder: "an address that ends with /mcp, mostly", spellcheck: "false", value: url,
    on: { invalid: () => { address.closest("details").open = true; } } });
  const key = h("input", { type: "password", "aria-label": "Token, if it asks for one", placeholder: "token, if any",
    autocomplete: "off", spellcheck: "false", value: token });
  const news = h("p", { class: "hint", role: "status" });
  const item = h("li", {}, address, key,
    h("button", { type: "button", text: "Check", on: { click: async () => {
      if (!address.value.trim() || !address.reportValidity()) return;
      setText(news, "Asking …");
      setText(news, await check(address.value.trim(), key.value.trim(), new AbortController().signal));
    } } }),
    iconButton("delete", "Remove this server", () => {
      (item.nextElementSibling ?? item.previousElementSibling)?.querySelector("input").focus();
      item.remove();
    }),
    news);
  return item;
}
