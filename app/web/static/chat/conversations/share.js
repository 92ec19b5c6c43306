// A prompt as a link: all of it is behind the `#`, which browsers send to no server.

import { samplingFields, settings } from "../../settings.js";

const PREFIX = "#prompt=";
// Characters of a link's prompt as it is encoded: what browsers and chats take as a link.
const MAX_LENGTH = 32_000;
// The parameters that a link may set, with the least and the greatest value.
const PARAMS = {
  temperature: [0, 2], top_p: [0, 1], top_k: [0, 1e6], min_p: [0, 1], repetition_penalty: [0.01, 100],
  max_tokens: [1, 1e7], seed: [-(2 ** 53), 2 ** 53],
};
const WHOLE = ["top_k", "max_tokens", "seed"];

/** A link that fills in a prompt, with the system prompt and the parameters of sampling of now. */
export function linkTo(prompt, given) {
  const fields = { ...samplingFields(), ...given?.params };
  const params = Object.fromEntries(Object.keys(PARAMS).filter((name) => name in fields).map((name) => [name, fields[name]]));
  const system = given?.system ?? settings.system;
  const shared = { ...(system.trim() && { system }), prompt, ...(Object.keys(params).length && { params }) };
  const encoded = encode(JSON.stringify(shared));
  if (encoded.length > MAX_LENGTH) throw new Error("This prompt is too long for a link.");
  return `${location.origin}${location.pathname}${PREFIX}${encoded}`;
}

export const isLink = (hash) => hash.startsWith(PREFIX);

/** What a link says, {prompt, given: {system, params} or null}; throws an Error that says what is wrong with it. */
export function readLink(hash) {
  const encoded = hash.slice(PREFIX.length);
  if (encoded.length > MAX_LENGTH) throw new Error("it is too long");
  let shared;
  try {
    shared = JSON.parse(decode(encoded));
  } catch {
    throw new Error("it is damaged");
  }
  if (shared?.constructor !== Object || typeof shared.prompt !== "string") throw new Error("it has no prompt");
  return { prompt: shared.prompt, given: readGiven(shared) };
}

/** The system prompt and the parameters of a conversation from outside, or null; throws an Error. */
export function readGiven({ system, params }) {
  if (system !== undefined && typeof system !== "string") throw new Error("its system prompt is no text");
  if (params !== undefined && params?.constructor !== Object) throw new Error("its parameters are none");
  for (const [name, value] of Object.entries(params ?? {})) {
    const [least, most] = Object.hasOwn(PARAMS, name) ? PARAMS[name] : [1, 0];
    const isRight = value >= least && value <= most && (!WHOLE.includes(name) || Number.isInteger(value));
    if (typeof value !== "number" || !isRight) throw new Error(`its ${name.slice(0, 40)} is no such parameter`);
  }
  if (system === undefined && !Object.keys(params ?? {}).length) return null;
  return { ...(system !== undefined && { system }), ...(params && { params }) };
}

/** What is used instead of the user's own settings, for the user to read. */
export const factsOf = ({ system, params }) => [
  system === undefined ? "" : `system prompt: “${system}”`,
  ...Object.entries(params ?? {}).map(([name, value]) => `${name}: ${value}`),
].filter(Boolean).join(", ");

function encode(text) {
  const letters = Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function decode(encoded) {
  const letters = atob(encoded.replaceAll("-", "+").replaceAll("_", "/"));
  return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(letters, (letter) => letter.charCodeAt(0)));
}
