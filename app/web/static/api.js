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

/** The ids of the models, the default first. */
export async function listModels() {
  const response = await send("/v1/models");
  return (await response.json()).data.map((card) => card.id);
}

/** Yield the chunks of a streamed chat completion; one that breaks off throws ConnectionLost. */
export async function* streamChat(body, signal) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.status);
    yield chunk;
  }
  throw new ConnectionLost("the connection was lost");
}

/** Yield the frames of the machine room. */
export async function* watchEngine(model, signal) {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  const response = await send(`/server/events${query}`, { signal });
  for await (const data of events(response)) yield JSON.parse(data);
}
