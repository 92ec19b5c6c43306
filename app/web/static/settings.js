// What the user has set: kept in this browser, the key only until it is closed unless it shall stay.

import { local, session } from "./storage.js";

const NAME = "settings";
const KEY = "api-key";
const TOKENS = "mcp-tokens";

/** Numbers are null where the server's own default shall hold. */
const DEFAULTS = {
  model: "",
  system: "",
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  repetition_penalty: null,
  max_tokens: null,
  seed: null,
  priority: "",
  reasoning_effort: "",
  tools: "",
  schema: "",
  compare: "",
  mcp_servers: [],
};

export const settings = { ...DEFAULTS, ...stored() };
const listeners = [];

function stored() {
  try {
    return JSON.parse(local.get(NAME)) ?? {};
  } catch {
    return {};
  }
}

/** Set some of them, and keep them. */
export function change(values) {
  Object.assign(settings, values);
  local.set(NAME, JSON.stringify(settings));
  for (const listener of listeners) listener();
}

// Another tab has set some.
window.addEventListener("storage", ({ key }) => {
  if (key !== NAME) return;
  Object.assign(settings, stored());
  for (const listener of listeners) listener();
});

/** Call `listener` after each change, of the key as well. */
export const onChange = (listener) => listeners.push(listener);

export const key = () => session.get(KEY) ?? local.get(KEY) ?? "";
export const isKeyKept = () => local.get(KEY) !== null || local.get(TOKENS) !== null;

/** The tokens of servers of tools, by address. */
export function tokens() {
  try {
    return JSON.parse(session.get(TOKENS) ?? local.get(TOKENS)) ?? {};
  } catch {
    return {};
  }
}

/** Set the key, and the tokens of servers of tools. */
export function changeKeys(value, newTokens, isKept) {
  for (const storage of [local, session]) for (const name of [KEY, TOKENS]) storage.remove(name);
  const storage = isKept ? local : session;
  if (value) storage.set(KEY, value);
  if (Object.keys(newTokens).length) storage.set(TOKENS, JSON.stringify(newTokens));
  for (const listener of listeners) listener();
}

/** The fields of a request that sampling needs. */
export function samplingFields() {
  const names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
  const fields = {};
  for (const name of names) if (settings[name] !== null) fields[name] = settings[name];
  if (settings.priority) fields.priority = settings.priority;
  if (settings.reasoning_effort) fields.reasoning_effort = settings.reasoning_effort;
  if (settings.tools.trim()) fields.tools = JSON.parse(settings.tools);
  if (settings.schema.trim()) {
    const schema = JSON.parse(settings.schema);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  return fields;
}
