// The tools of the servers that the user lists, and which of them may be called unasked.

import { send } from "../api.js";
import { readImage } from "../chat/messages/images.js";
import { onChange, settings, tokens } from "../settings.js";
import { session } from "../storage.js";
import { McpClient } from "./client.js";

const ALLOWED = "allowed-tools";
const SETTING = "MLX_SERVER_MCP_ORIGINS";
// What function names may consist of, in all APIs.
const MAX_NAME = 64;
// Characters of a result; images of one, and the bytes of one as base64.
const MAX_RESULT = 100_000;
const MAX_IMAGES = 4;
const MAX_IMAGE = 1 << 22;

const connections = new Map(); // by URL: {client, token, tools}
let known = new Map(); // by the name that the model uses: {server, tool}

// Servers that are listed no longer, or by another token.
onChange(() => {
  for (const [url, { client, token }] of connections) {
    if (settings.mcp_servers.includes(url) && token === (tokens()[url] ?? "")) continue;
    client.close();
    connections.delete(url);
  }
});
window.addEventListener("pagehide", () => {
  for (const { client } of connections.values()) client.close();
});

/** Ask each listed server for its tools; returns what went wrong, a sentence for each that failed. */
export async function refreshTools(signal) {
  const faults = await Promise.all(settings.mcp_servers.map((url) => connect(url, signal)));
  known = named(ownNames());
  return faults.filter(Boolean);
}

/** The number of tools that a server offers, or what is wrong with it, as a sentence. */
export async function check(url, token, signal) {
  const client = new McpClient(url, token);
  try {
    await refuseForeign(url);
    const { length } = await client.tools(signal);
    return `${length} tool${length === 1 ? "" : "s"}.`;
  } catch (error) {
    return sentence(url, error);
  } finally {
    client.close();
  }
}

async function connect(url, signal) {
  const token = tokens()[url] ?? "";
  const connection = connections.get(url) ?? { client: new McpClient(url, token), token };
  connections.set(url, connection);
  try {
    await refuseForeign(url);
    connection.tools = await connection.client.tools(signal);
    return "";
  } catch (error) {
    connection.client.close();
    connections.delete(url);
    return signal.aborted ? "" : sentence(url, error);
  }
}

const sentence = (url, error) => `${url}: ${error.message}.`;

/** The browser would refuse it as well, but not say what to do. */
async function refuseForeign(url) {
  const { origin } = new URL(url);
  const policy = (await send("/", { method: "HEAD" })).headers.get("Content-Security-Policy") ?? "";
  const sources = /connect-src ([^;]*)/.exec(policy)?.[1].split(" ") ?? [origin];
  if (origin === location.origin || sources.includes(origin)) return;
  throw new Error(`this page may not call it; start the server of the page with ${SETTING}=${origin}`);
}

function named(taken) {
  const found = new Map();
  for (const server of settings.mcp_servers) {
    for (const tool of connections.get(server)?.tools ?? []) {
      found.set(freeName(server, tool.name, (name) => found.has(name) || taken.includes(name)), { server, tool });
    }
  }
  return found;
}

function freeName(server, name, isTaken) {
  const own = valid(name);
  if (!isTaken(own)) return own;
  const longer = valid(`${new URL(server).host}_${name}`);
  let free = longer;
  for (let i = 2; isTaken(free); i += 1) free = `${longer.slice(0, MAX_NAME - 4)}_${i}`;
  return free;
}

const valid = (name) => name.replace(/[^a-zA-Z0-9_-]/g, "_").slice(0, MAX_NAME);
const ownNames = () => (settings.tools.trim() ? JSON.parse(settings.tools) : []).map((tool) => tool?.function?.name);

/** The definitions of all tools that are known, for a request. */
export const definitions = () => [...known].map(([name, { tool }]) => ({
  type: "function",
  function: { name, description: String(tool.description ?? ""), parameters: tool.inputSchema },
}));

/** The server of the tool with that name; undefined where the user returns the results. */
export const serverOf = (name) => known.get(name)?.server;

export const isAllowed = (name) => allowed().includes(signature(name));

/** Let a tool be called unasked until the tab is closed, as long as its definition stays. */
export function allow(name) {
  if (known.has(name) && !isAllowed(name)) session.set(ALLOWED, JSON.stringify([...allowed(), signature(name)]));
}

const signature = (name) => (known.has(name) ? JSON.stringify(Object.values(known.get(name))) : null);

function allowed() {
  try {
    return JSON.parse(session.get(ALLOWED)) ?? [];
  } catch {
    return [];
  }
}

/** Call a tool, as the model has asked; resolves to {text, images}, also where it fails; rejects when aborted. */
export async function callTool({ name, arguments: json, server }, signal) {
  try {
    if (serverOf(name) === undefined) await refreshTools(signal);
    const found = known.get(name);
    // A tool of that name may be another server's by now.
    if (!found || found.server !== server) throw new Error("no server that is listed has this tool");
    const args = JSON.parse(json || "{}");
    return await contentOf(await connections.get(server).client.call(found.tool.name, args, signal));
  } catch (error) {
    if (signal.aborted) throw error;
    return { text: `The call has failed: ${error.message}.`, images: [] };
  }
}

async function contentOf({ content, structuredContent, isError }) {
  const [texts, images] = [[], []];
  for (const part of Array.isArray(content) ? content : []) {
    const image = part?.type === "image" && images.length < MAX_IMAGES ? await imageOf(part) : null;
    if (image) images.push(image);
    texts.push(textOf(part, image));
  }
  if (!texts.length && structuredContent !== undefined) texts.push(JSON.stringify(structuredContent));
  let text = (isError ? ["The tool reports an error."] : []).concat(texts).join("\n");
  if (text.length > MAX_RESULT) text = `${text.slice(0, MAX_RESULT)}\n[cut: ${text.length} characters]`;
  return { text, images };
}

function textOf(part, image) {
  if (part?.type === "text") return String(part.text);
  if (part?.type === "resource" && typeof part.resource?.text === "string") return part.resource.text;
  if (part?.type === "resource_link") return `[link: ${part.uri}]`;
  return image ? "[image, shown to the user]" : `[${part?.type ?? "nothing"}, left out]`;
}

/** The image as the browser draws it; null if it is none or is large. */
async function imageOf({ data, mimeType }) {
  try {
    if (data.length > MAX_IMAGE) return null;
    return await readImage(new Blob([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], { type: mimeType }));
  } catch {
    return null;
  }
}
