// From a conversation to a request, and from the chunks of its response to a message.

import { streamChat } from "../api.js";
import { samplingFields, settings } from "../settings.js";
import { dataUrl } from "./images.js";

/**
 * Let the model write `message`, the last one of `messages`; what it has already is continued.
 *
 * Never throws: the message says how it ended.  `onChange` is called after each chunk.
 */
export async function generate(messages, message, signal, onChange) {
  const clock = new Clock(message);
  message.status = "streaming";
  delete message.error;
  message.asked = settings.model;
  try {
    for await (const chunk of streamChat(await requestOf(messages, message), signal)) {
      apply(chunk, message, clock);
      onChange();
    }
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

async function requestOf(messages, message) {
  const turns = (await Promise.all(messages.slice(0, messages.indexOf(message)).map(turnsOf))).flat();
  if (settings.system.trim()) turns.unshift({ role: "system", content: settings.system });
  const continued = message.content !== "";
  if (continued) turns.push({ role: "assistant", content: message.content });
  return {
    // Before the models are known, the server's default.
    ...(settings.model && { model: settings.model }),
    messages: turns,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_timings: true,
    ...samplingFields(),
    ...(continued && { continue_final_message: true, add_generation_prompt: false }),
  };
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

async function contentOf({ content, images }) {
  if (!images?.length) return content;
  const urls = await Promise.all(images.map(dataUrl));
  return [
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
