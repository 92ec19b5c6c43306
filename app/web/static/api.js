// The server's API, as any client calls it.

import { key } from "./settings.js";
import { ConnectionLost, events } from "./sse.js";

/** The server has rejected a request, or ended it with an error. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Send a request; throws ApiError for an error status, ConnectionLost where there is no server. */
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("the server cannot be reached");
  }
  if (!response.ok) throw new ApiError(await messageOf(response), response.status);
  return response;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server responded with status ${response.status}`;
  }
}

/** The models, the default first. */
export async function listModels() {
  const response = await send("/v1/models");
  return (await response.json()).data;
}

/** Let a model be loaded, or unloaded: `act` is "load" or "unload".  The response does not wait for that. */
export const move = (act, model) => post(`/models/${act}`, { model });

const post = (path, body, signal) => send(path, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

/** Yield the chunks of a streamed chat completion; one that breaks off throws ConnectionLost. */
export async function* streamChat(body, signal) {
  const response = await post("/v1/chat/completions", body, signal);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.status);
    yield chunk;
  }
  throw new ConnectionLost("the connection was lost");
}

/** Yield the frames of the machine room. */
export const watchEngine = (model, signal) =>
  watch(`/server/events${model ? `?model=${encodeURIComponent(model)}` : ""}`, signal);

/** Yield the state of each model, and its changes. */
export const watchModels = (signal) => watch("/models/sse", signal);

async function* watch(path, signal) {
  const response = await send(path, { signal });
  for await (const data of events(response)) yield JSON.parse(data);
}
