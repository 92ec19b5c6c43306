// From a conversation to a request, and from the chunks of its response to a message.

import { streamChat } from "../api.js";
import { definitions, refreshTools, serverOf } from "../mcp/tools.js";
import { samplingFields, settings } from "../settings.js";
import { dataUrl } from "./messages/images.js";

// Times in a row that the model may call tools; then it has to say something.
const MAX_ROUNDS = 10;

/**
 * Let the model write `message`, which is `place` in the conversation or its rival; what it has already is continued.
 *
 * Never throws: the message says how it ended.  `onChange` is called after each chunk.
 */
export async function generate(conversation, place, message, signal, onChange) {
  const clock = new Clock(message);
  message.status = "streaming";
  delete message.error;
  if (message === place) message.asked = settings.model;
  try {
    for await (const chunk of streamChat(await requestOf(conversation, place, message, signal), signal)) {
      apply(chunk, message, clock);
      onChange();
    }
    for (const call of message.calls) if (serverOf(call.name)) call.server = serverOf(call.name);
    message.status = "done";
  } catch (error) {
    message.status = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) {
      message.error = sentence(error.message);
      message.errorStatus = error.status;
    }
  }
  onChange();
}

async function requestOf({ messages, given }, place, message, signal) {
  const earlier = messages.slice(0, messages.indexOf(place));
  // Each of two models has seen its own messages.
  const seen = message === place ? earlier : earlier.map((other) => other.rival ?? other);
  const turns = (await Promise.all(seen.map(turnsOf))).flat();
  const system = given?.system ?? settings.system;
  if (system.trim()) turns.unshift({ role: "system", content: system });
  const continued = message.content !== "";
  if (continued) turns.push({ role: "assistant", content: message.content });
  return {
    // Before the models are known, the server's default.
    ...(message.asked && { model: message.asked }),
    messages: turns,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_timings: true,
    ...await fieldsOf(seen, place, message, signal),
    ...given?.params,
    ...(continued && { continue_final_message: true, add_generation_prompt: false }),
  };
}

async function fieldsOf(seen, place, message, signal) {
  const { tools: own = [], ...fields } = samplingFields();
  message.isJson = fields.response_format !== undefined;
  // Whose call would be answered, and for whom?
  if (place.rival) return fields;
  if (settings.mcp_servers.length) message.note = (await refreshTools(signal)).join(" ");
  const tools = [...own, ...(settings.mcp_servers.length ? definitions() : [])];
  if (!tools.length) return fields;
  const round = seen.slice(seen.findLastIndex(({ role }) => role === "user") + 1);
  const numRounds = round.filter(({ calls }) => calls?.length).length;
  return { ...fields, tools, ...(numRounds >= MAX_ROUNDS && { tool_choice: "none" }) };
}

async function turnsOf(message) {
  if (message.role === "user") return [{ role: "user", content: await contentOf(message) }];
  if (message.role === "tool") {
    return [{ role: "tool", tool_call_id: message.callId, content: message.content }];
  }
  if (!message.content && !message.calls.length) return [];
  const turn = { role: "assistant", content: message.content };
  if (message.reasoning) turn.reasoning_content = message.reasoning;
  if (message.calls.length) {
    turn.tool_calls = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return [turn];
}

async function contentOf({ content, images = [], files = [] }) {
  if (!images.length && !files.length) return content;
  const urls = await Promise.all(images.map(dataUrl));
  return [
    // First: so they are in the cached prefix of another question.
    ...await Promise.all(files.map(async ({ name, blob }) => (
      { type: "file", file: { filename: name, file_data: await dataUrl(blob) } }))),
    ...(content ? [{ type: "text", text: content }] : []),
    ...urls.map((url) => ({ type: "image_url", image_url: { url } })),
  ];
}

function apply(chunk, message, clock) {
  const [choice] = chunk.choices;
  message.model = chunk.model;
  if (choice) {
    const { delta } = choice;
    if (delta.reasoning_content) {
      clock.begin();
      message.reasoning += delta.reasoning_content;
      message.reasoningSeconds = clock.seconds();
    }
    if (delta.content) {
      clock.begin();
      message.content += delta.content;
    }
    for (const piece of delta.tool_calls ?? []) {
      clock.begin();
      applyCall(piece, message.calls);
    }
    if (choice.finish_reason) message.finishReason = choice.finish_reason;
  }
  if (chunk.usage) {
    message.usage = chunk.usage;
    clock.count(chunk.usage.completion_tokens);
  }
  if (chunk.timings) message.tokensPerSecond = chunk.timings.predicted_per_second;
}

function applyCall(piece, calls) {
  if (piece.id) calls[piece.index] = { id: piece.id, name: piece.function.name, arguments: "" };
  calls[piece.index].arguments += piece.function.arguments ?? "";
}

/** Measures a message as the user sees it, until the server sends what it has measured. */
class Clock {
  #message;
  #asked = performance.now();
  #first = null;

  constructor(message) {
    this.#message = message;
  }

  begin() {
    if (this.#first !== null) return;
    this.#first = performance.now();
    this.#message.firstTokenSeconds = (this.#first - this.#asked) / 1000;
  }

  seconds() {
    return (performance.now() - this.#first) / 1000;
  }

  count(numTokens) {
    const seconds = this.#first === null ? 0 : this.seconds();
    if (seconds > 0.2) this.#message.tokensPerSecond = (numTokens - 1) / seconds;
  }
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");
