// A client of a server of tools: the Model Context Protocol over streamable HTTP.

import { ConnectionLost, events } from "../sse.js";

// Up to these a connection begins with a handshake, and may have a session.
const WITH_SESSION = ["2025-11-25", "2025-06-18", "2025-03-26"];
// From this one on each request says what the handshake has said.
const STATELESS = "2026-07-28";
const CLIENT = { name: "mlx-batch-server", version: "1" };
// Milliseconds: for an answer about the server, and for a call.
const ANSWER_LIMIT = 15_000;
const CALL_LIMIT = 300_000;
// Characters of an answer, pages of a list, and tools.
const MAX_LENGTH = 1 << 23;
const MAX_PAGES = 20;
const MAX_TOOLS = 128;

/** The server has answered with an error, or with what is no answer. */
export class McpError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class McpClient {
  #url;
  #token;
  #version = null;
  #session = null;
  #numSent = 0;

  constructor(url, token) {
    this.#url = url;
    this.#token = token;
  }

  /** All tools: [{name, description, inputSchema}]. */
  async tools(signal) {
    const tools = [];
    let cursor;
    for (let i = 0; i < MAX_PAGES && tools.length < MAX_TOOLS; i += 1) {
      const page = await this.#ask("tools/list", cursor === undefined ? {} : { cursor }, signal, ANSWER_LIMIT);
      if (!Array.isArray(page.tools)) throw new McpError("its list of tools is none");
      tools.push(...page.tools.filter(isTool));
      cursor = page.nextCursor;
      if (cursor === undefined || cursor === null) break;
    }
    return tools.slice(0, MAX_TOOLS);
  }

  /** Call a tool; resolves to its result, {content, structuredContent, isError}. */
  async call(name, args, signal) {
    const result = await this.#ask("tools/call", { name, arguments: args }, signal, CALL_LIMIT);
    if (result.resultType === "input_required") throw new McpError("it asks for input, which this page has none of");
    return result;
  }

  /** End the session, if there is one; nothing waits for it. */
  close() {
    if (!this.#session) return;
    const options = { method: "DELETE", headers: this.#headers(), credentials: "omit", keepalive: true };
    fetch(this.#url, options).catch(() => {});
    this.#session = null;
    this.#version = null;
  }

  async #ask(method, params, signal, limit) {
    const within = AbortSignal.any([signal, AbortSignal.timeout(limit)]);
    try {
      if (!this.#version) await this.#begin(within);
      const hadSession = this.#session !== null;
      try {
        return await this.#request(method, params, within, limit);
      } catch (error) {
        // The server has forgotten the session.
        if (error.status !== 404 || !hadSession) throw error;
        await this.#begin(within);
        return await this.#request(method, params, within, limit);
      }
    } catch (error) {
      if (!signal.aborted && within.aborted) throw new McpError(`no answer within ${limit / 1000} seconds`);
      throw error;
    }
  }

  async #begin(signal) {
    this.#session = null;
    this.#version = null;
    let hello;
    try {
      const params = { protocolVersion: WITH_SESSION[0], capabilities: {}, clientInfo: CLIENT };
      hello = await this.#request("initialize", params, signal, ANSWER_LIMIT);
    } catch (error) {
      // A server without handshakes says so as an error of some kind.
      if (!(error instanceof McpError) || [401, 403].includes(error.status)) throw error;
      this.#version = STATELESS;
      return;
    }
    if (!WITH_SESSION.includes(hello.protocolVersion)) {
      throw new McpError(`it speaks version ${hello.protocolVersion} of the protocol, which this page does not`);
    }
    this.#version = hello.protocolVersion;
    await (await this.#post({ method: "notifications/initialized" }, signal)).body?.cancel();
  }

  async #request(method, params, signal, limit) {
    this.#numSent += 1;
    const id = this.#numSent;
    try {
      const response = await this.#post({ id, method, params: { ...params, ...this.#meta() } }, signal);
      if (method === "initialize") this.#session = response.headers.get("Mcp-Session-Id");
      for await (const message of messagesOf(response, limit)) {
        if (message.id === id && ("result" in message || "error" in message)) return resultOf(message);
        if (message.method && message.id !== undefined) await this.#respond(message, signal);
      }
    } catch (error) {
      if (signal.aborted && method === "tools/call") this.#cancel(id);
      throw error;
    }
    throw new McpError("it has ended the response without an answer");
  }

  /** Answer what the server asks: it may ask whether the page is there. */
  async #respond({ id, method }, signal) {
    const error = { code: -32601, message: "this client offers nothing of that kind" };
    const response = await this.#post({ id, ...(method === "ping" ? { result: {} } : { error }) }, signal);
    await response.body?.cancel();
  }

  #cancel(requestId) {
    const note = { method: "notifications/cancelled", params: { requestId } };
    this.#post(note, AbortSignal.timeout(ANSWER_LIMIT)).catch(() => {});
  }

  async #post(message, signal) {
    const options = {
      method: "POST",
      headers: this.#headers(message),
      body: JSON.stringify({ jsonrpc: "2.0", ...message }),
      // The user's cookies of that site are not the model's to use.
      credentials: "omit",
      redirect: "error",
      cache: "no-store",
      signal,
    };
    let response;
    try {
      response = await fetch(this.#url, options);
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ConnectionLost("it cannot be reached, or does not allow this page (CORS)");
    }
    if (!response.ok) {
      response.body?.cancel();
      throw new McpError(faultOf(response.status), response.status);
    }
    return response;
  }

  #headers(message) {
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
    if (this.#token) headers.Authorization = `Bearer ${this.#token}`;
    if (this.#version) headers["MCP-Protocol-Version"] = this.#version;
    if (this.#session) headers["Mcp-Session-Id"] = this.#session;
    if (this.#version === STATELESS && message.method) {
      headers["Mcp-Method"] = message.method;
      if (message.params?.name) headers["Mcp-Name"] = message.params.name;
    }
    return headers;
  }

  #meta() {
    if (this.#version !== STATELESS) return {};
    const name = (field) => `io.modelcontextprotocol/${field}`;
    return { _meta: {
      [name("protocolVersion")]: STATELESS, [name("clientInfo")]: CLIENT, [name("clientCapabilities")]: {},
    } };
  }
}

async function* messagesOf(response, limit) {
  const type = response.headers.get("Content-Type") ?? "";
  if (type.startsWith("text/event-stream")) {
    for await (const data of events(response, limit, MAX_LENGTH)) if (data) yield* parsed(data);
  } else if (type.startsWith("application/json")) yield* parsed(await textOf(response));
  else {
    response.body?.cancel();
    throw new McpError("it has answered with neither JSON nor events");
  }
}

function parsed(text) {
  let message;
  try {
    message = JSON.parse(text);
  } catch {
    throw new McpError("it has sent what is no JSON");
  }
  return [message].flat().filter((item) => item !== null && typeof item === "object");
}

async function textOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return text;
    text += value;
    if (text.length > MAX_LENGTH) {
      reader.cancel().catch(() => {});
      throw new McpError("it has sent too much");
    }
  }
}

function resultOf({ result, error }) {
  if (error) throw new McpError(String(error.message ?? "it has answered with an error").slice(0, 500));
  if (result === null || typeof result !== "object") throw new McpError("its answer is none");
  return result;
}

function faultOf(status) {
  if (status === 401) return "it asks for a token, or does not know this one";
  return status === 403 ? "it refuses this page or its token" : `it has answered with status ${status}`;
}

const isTool = (tool) => typeof tool?.name === "string" && tool.name !== "" &&
  tool.inputSchema !== null && typeof tool.inputSchema === "object";
