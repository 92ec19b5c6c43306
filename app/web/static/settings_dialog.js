// The dialog of settings.

import { $, h } from "./dom.js";
import { serverFields } from "./mcp/server_fields.js";
import { change, changeKeys, isKeyKept, key, settings } from "./settings.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: "any" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];

const CHOICES = [
  { name: "priority", label: "Priority", options: ["", "high", "normal", "low"] },
  { name: "reasoning_effort", label: "Reasoning", options: ["", "none", "low", "medium", "high"] },
];

const dialog = $("settings");

/** Show the dialog; `reason` says why it came by itself. */
export function openSettings(reason = "") {
  dialog.replaceChildren(form(reason));
  dialog.showModal();
}

function form(reason) {
  const fields = new Map();
  const field = (name, label, input) => {
    input.id = `setting-${name}`;
    fields.set(name, input);
    return h("div", { class: "field" }, h("label", { for: input.id, text: label }), input);
  };
  const numbers = NUMBERS.map(({ name, label, ...limits }) => {
    const input = h("input", { type: "number", placeholder: "the server's", ...limits });
    input.value = settings[name] ?? "";
    return field(name, label, input);
  });
  const choices = CHOICES.map(({ name, label, options }) => {
    const items = options.map((value) => h("option", { value, text: value || "the server's" }));
    const select = h("select", {}, ...items);
    select.value = settings[name];
    return field(name, label, select);
  });
  const keyInput = h("input", { type: "password", autocomplete: "off", spellcheck: "false", value: key() });
  const keep = h("input", { type: "checkbox", id: "setting-keep" });
  keep.checked = isKeyKept();
  const system = h("textarea", { rows: 3, value: settings.system });
  const tools = jsonField(4, settings.tools, toolsFault,
    '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]');
  const schema = jsonField(4, settings.schema, schemaFault,
    '{"type": "object", "properties": {…}, "required": […]}');
  const servers = serverFields();

  const save = (event) => {
    event.preventDefault();
    const number = ({ name }) => [name, fields.get(name).value === "" ? null : fields.get(name).valueAsNumber];
    change({
      ...Object.fromEntries(NUMBERS.map(number)),
      ...Object.fromEntries(CHOICES.map(({ name }) => [name, fields.get(name).value])),
      system: system.value,
      tools: tools.value,
      schema: schema.value,
      mcp_servers: servers.values().urls,
    });
    changeKeys(keyInput.value.trim(), servers.values().tokens, keep.checked);
    dialog.close();
  };

  return h("form", { on: { submit: save } },
    h("h2", { id: "settings-title", text: "Settings" }),
    reason ? h("p", { class: "error", role: "alert", text: reason }) : null,
    field("key", "API key, if the server asks for one", keyInput),
    h("div", { class: "check" }, keep, h("label", { for: "setting-keep", text: "Keep the key, and tokens, when the tab is closed" })),
    field("system", "System prompt", system),
    h("fieldset", {}, h("legend", { text: "Sampling" }), h("div", { class: "grid" }, ...numbers, ...choices)),
    h("details", {}, h("summary", { text: "Tools" }),
      h("p", { class: "hint", text: "The calls are shown, and you write what they return." }),
      field("tools", "Definitions, as OpenAI’s JSON", tools)),
    h("details", { open: settings.mcp_servers.length > 0 }, h("summary", { text: "Tool servers (MCP)" }), servers.element),
    h("details", {}, h("summary", { text: "Structured output" }),
      field("schema", "JSON schema of each response", schema)),
    h("div", { class: "actions" },
      h("button", { type: "button", text: "Cancel", on: { click: () => dialog.close() } }),
      h("button", { type: "submit", class: "primary", text: "Save" })));
}

function jsonField(rows, value, faultOf, placeholder) {
  const area = h("textarea", { rows, class: "code", spellcheck: "false", value, placeholder, on: {
    input: () => area.setCustomValidity(faultOf(area.value)),
    // What is folded cannot say what is wrong with it.
    invalid: () => { area.closest("details").open = true; },
  } });
  return area;
}

const toolsFault = (text) => jsonFault(text, Array.isArray, "This is not a list.");
const schemaFault = (text) =>
  jsonFault(text, (value) => value?.constructor === Object, "This is not an object.");

function jsonFault(text, isRight, fault) {
  if (!text.trim()) return "";
  try {
    return isRight(JSON.parse(text)) ? "" : fault;
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}
