// A message on the page: what it shows follows from the message, however often that changes.

import { copyButton, h, iconButton, setText } from "../../dom.js";
import { waitFor } from "../../models.js";
import { bothOf } from "../conversations/conversations.js";
import { removable, shownOf } from "./attached.js";
import { thumbnails } from "./images.js";
import { MarkdownStream } from "./markdown_stream.js";

/**
 * `actions`: edit(message, text, attached), regenerate(message), proceed(message), respond(message, call, text),
 * unansweredCalls(message), decide(message, call, decision), stateOf(call), stop(message), choose(message, chosen),
 * link(text).
 */
export function viewOf(message, actions) {
  if (message.rival) return new ComparedView(message, actions);
  if (message.role === "assistant") return new AssistantView(message, actions);
  return message.role === "user" ? new UserView(message, actions) : new ToolView(message);
}

class UserView {
  element = h("li", { class: "message user" });
  #attached;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.#attached = h("div", { class: "images" }, ...shownOf(message));
    this.#show();
  }

  update() {}

  #show() {
    const { content } = this.message;
    this.element.replaceChildren(
      h("h2", { class: "sr-only", text: "You" }),
      this.#attached,
      content ? h("div", { class: "bubble", text: content }) : "",
      h("div", { class: "tools" },
        iconButton("edit", "Edit", () => this.#edit()),
        content ? copyButton("Copy", () => content) : "",
        content ? copyButton("Copy a link to this prompt", () => this.actions.link(content), "link") : ""),
    );
  }

  #edit() {
    const { content, images = [], files = [] } = this.message;
    const area = h("textarea", { "aria-label": "Edit the message", rows: 3, value: content });
    const kept = { images: [...images], files: [...files] };
    const list = h("ul", { class: "images" });
    const showKept = () => list.replaceChildren(...removable(kept, () => {
      showKept();
      area.focus();
    }));
    showKept();
    const close = () => {
      this.#show();
      this.element.querySelector(".tools button").focus();
    };
    const save = (event) => {
      event.preventDefault();
      if (area.value.trim() || list.children.length) this.actions.edit(this.message, area.value.trim(), kept);
    };
    const onKey = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.target === area && event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
    };
    this.element.replaceChildren(
      list,
      h("form", { class: "edit", on: { submit: save, keydown: onKey } }, area,
        h("div", { class: "actions" },
          h("span", { class: "hint", text: "What follows is replaced." }),
          h("button", { type: "button", text: "Cancel", on: { click: close } }),
          h("button", { type: "submit", class: "primary", text: "Send" }))),
    );
    area.focus();
  }
}

class ToolView {
  constructor(message) {
    this.element = h("li", { class: "message tool" },
      // What the user has written is seen, and what a server has sent is folded.
      h("details", { open: !message.name }, h("summary", { text: `Result of ${message.name ?? "the call"}` }),
        h("pre", { tabindex: 0, text: message.content }),
        h("div", { class: "images" }, ...thumbnails(message.images ?? []))));
    this.message = message;
  }

  update() {}
}

/** The messages of two models that answer the same, side by side. */
class ComparedView {
  #views;

  constructor(message, actions) {
    this.#views = bothOf(message).map((one) => {
      // Only the first one is in the conversation.
      const regenerate = () => actions.regenerate(message);
      const view = new AssistantView(one, { ...actions, regenerate, unansweredCalls: () => [] });
      view.element.prepend(h("div", { class: "side" },
        h("strong", { text: one.asked }),
        iconButton("stop", `Stop ${one.asked}`, () => actions.stop(one)),
        h("button", { type: "button", text: "Continue with this", on: { click: () => actions.choose(message, one) } })));
      return view;
    });
    this.element = h("li", {}, h("ol", { class: "compared" }, ...this.#views.map(({ element }) => element)));
  }

  update() {
    for (const view of this.#views) view.update();
  }
}

class AssistantView {
  element = h("li", { class: "message assistant" });
  #markdown = new MarkdownStream();
  #reasoning = new ReasoningView();
  #calls = h("div", { class: "calls" });
  #fault = h("div", { class: "fault", hidden: true });
  #facts = h("span", { class: "facts" });
  #wait = h("p", { class: "wait" });
  #note = h("p", { class: "hint", role: "status" });
  #tools;
  #shownStatus = null;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.#tools = h("div", { class: "tools" },
      copyButton("Copy", () => message.content),
      iconButton("again", "Regenerate", () => actions.regenerate(message)),
      this.#facts);
    this.element.append(h("h2", { class: "sr-only", text: "Model" }),
      this.#note, this.#wait, this.#reasoning.element, this.#markdown.element, this.#calls, this.#fault, this.#tools);
    this.update();
  }

  update() {
    const { message } = this;
    const isStreaming = message.status === "streaming";
    if (!isStreaming && message.status === this.#shownStatus && !message.calls.length) return;
    this.#shownStatus = message.status;
    this.element.classList.toggle("streaming", isStreaming);
    const isSilent = isStreaming && !message.content && !message.reasoning;
    this.element.classList.toggle("silent", isSilent);
    setText(this.#wait, isSilent ? waitFor(message.asked) : "");
    this.element.setAttribute("aria-busy", isStreaming);
    this.#reasoning.update(message);
    setText(this.#note, message.note ?? "");
    const { content } = message;
    this.#markdown.update(content && message.isJson ? `\`\`\`json\n${indented(content)}\n\`\`\`` : content, !isStreaming);
    this.#showCalls();
    this.#showFault();
    setText(this.#facts, factsOf(message));
    for (const button of this.#tools.querySelectorAll("button")) button.hidden = isStreaming;
  }

  #showCalls() {
    const { calls, status } = this.message;
    calls.forEach((call, i) => {
      const shown = this.#calls.children[i] ?? this.#calls.appendChild(callOf(call));
      setText(shown.querySelector("pre"), indented(call.arguments));
    });
    if (status === "streaming") return;
    const unanswered = this.actions.unansweredCalls(this.message);
    calls.forEach((call, i) => {
      const shown = this.#calls.children[i];
      const state = unanswered.includes(call) ? (call.server ? this.actions.stateOf(call) : "open") : "answered";
      if (shown.dataset.state === state) return;
      shown.dataset.state = state;
      shown.querySelector(".answer")?.remove();
      if (state !== "answered") shown.append(call.server ? this.#decisionOn(call, state) : this.#resultForm(call));
    });
  }

  #decisionOn(call, state) {
    const { server } = call;
    if (state !== "asked") return h("p", { class: "answer hint", text: { running: "Calling …" }[state] ?? `${state}.` });
    const button = (label, decision) => h("button", { type: "button", text: label, on: {
      click: () => this.actions.decide(this.message, call, decision),
    } });
    return h("div", { class: "answer actions", role: "group", "aria-label": `Call ${call.name} of ${server}?` },
      h("span", { class: "hint", text: `Call this tool of ${server}?` }),
      button("Allow once", "once"), button("Always for this tool", "always"), button("Deny", "denied"));
  }

  #resultForm(call) {
    const area = h("textarea", { rows: 2, placeholder: "What it returns", "aria-label": `Result of ${call.name}` });
    const submit = (event) => {
      event.preventDefault();
      this.actions.respond(this.message, call, area.value);
    };
    return h("form", { class: "answer", on: { submit } }, area, h("button", { type: "submit", text: "Return" }));
  }

  #showFault() {
    const { message } = this;
    const isCut = message.finishReason === "length" && message.status === "done";
    const text = { failed: message.error, stopped: "Stopped." }[message.status] ?? (isCut ? "The limit of tokens is reached." : "");
    if (this.#fault.dataset.text === text) return;
    this.#fault.dataset.text = text;
    this.#fault.hidden = !text;
    this.#fault.classList.toggle("error", message.status === "failed");
    const canContinue = message.content && !message.calls.length;
    this.#fault.replaceChildren(
      h("span", { text }),
      canContinue ? h("button", { type: "button", text: "Continue", on: { click: () => this.actions.proceed(message) } }) : "",
      h("button", { type: "button", text: "Try again", on: { click: () => this.actions.regenerate(message) } }),
    );
  }
}

/** Reasoning, folded; a text only, for there is much of it and little to format. */
class ReasoningView {
  #title = h("summary");
  #text = document.createTextNode("");
  element = h("details", { class: "reasoning", hidden: true }, this.#title, h("div", {}, this.#text));

  update({ reasoning, reasoningSeconds, content, status }) {
    this.element.hidden = !reasoning;
    if (reasoning.startsWith(this.#text.data)) {
      this.#text.appendData(reasoning.slice(this.#text.data.length));
    } else this.#text.data = reasoning;
    const isThinking = status === "streaming" && !content;
    setText(this.#title, `${isThinking ? "Reasoning" : "Reasoned"} for ${(reasoningSeconds ?? 0).toFixed(1)} s`);
  }
}

function callOf({ name }) {
  return h("div", { class: "call" },
    h("details", { open: true }, h("summary", {}, "Calls ", h("code", { text: name })), h("pre", { tabindex: 0 })));
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not whole yet
  }
}

function factsOf({ usage, tokensPerSecond, firstTokenSeconds, model, status }) {
  if (!usage) return "";
  const { prompt_tokens: numPrompt, completion_tokens: numTokens } = usage;
  const numCached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const facts = [`${numTokens} tokens`];
  if (tokensPerSecond) facts.push(`${tokensPerSecond.toFixed(1)} tokens/s`);
  if (firstTokenSeconds !== undefined) facts.push(`first after ${firstTokenSeconds.toFixed(2)} s`);
  if (status !== "streaming") facts.push(`prompt ${numPrompt}${numCached ? `, ${numCached} cached` : ""}`, model);
  return facts.join(" · ");
}
