// The chat: the shown conversation, and those in which the model still writes.

import { $, setText } from "../dom.js";
import { onModels } from "../models.js";
import { openSettings } from "../settings_dialog.js";
import { session } from "../storage.js";
import { Announcer } from "./announcer.js";
import { Attachments } from "./attachments.js";
import { ConversationList } from "./conversation_list.js";
import {
  assistantMessage, loadAll, newConversation, onChangeElsewhere, remove, save, titleOf, toolMessage, userMessage,
} from "./conversations.js";
import { generate } from "./generation.js";
import { viewOf } from "./message_view.js";
import { Throttle } from "./throttle.js";

// Milliseconds between two times that a growing conversation is kept.
const SAVE_INTERVAL = 1000;
// Pixels from the end, within which the view follows what is added.
const NEAR = 80;
// Where the tab keeps which conversation it shows.
const SHOWN = "conversation";

const SUGGESTIONS = [
  "Explain continuous batching in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Compare HTTP/1.1 and HTTP/2 in a table.",
];

export class ChatView {
  #conversations = [];
  #shown = newConversation();
  #views = new Map(); // by message
  #running = new Map(); // AbortControllers, by conversation
  #scroller = $("messages");
  #attachments = new Attachments(() => this.#shown.messages.flatMap(({ images }) => images ?? []).length);
  #announcer = new Announcer($("announcer"));
  #throttle = new Throttle(() => this.#render());
  #list = new ConversationList($("conversations"), {
    show: (conversation) => this.show(conversation),
    remove: (conversation) => this.#remove(conversation),
  });
  #actions = {
    edit: (message, text) => this.#restart(message, userMessage(text, message.images)),
    regenerate: (message) => this.#regenerate(message),
    proceed: (message) => this.#proceed(message),
    respond: (message, call, text) => this.#respond(message, call, text),
    unansweredCalls: (message) => this.#unansweredCalls(message),
  };

  constructor({ onNavigate, onUnknownModel }) {
    this.onNavigate = onNavigate;
    this.onUnknownModel = onUnknownModel;
    $("new-chat").addEventListener("click", () => this.show(newConversation()));
    $("composer").addEventListener("submit", (event) => this.#submit(event));
    $("stop").addEventListener("click", () => this.stop());
    $("prompt").addEventListener("keydown", (event) => this.#onKey(event));
    $("prompt").addEventListener("input", () => this.#fitPrompt());
    $("to-latest").addEventListener("click", () => this.#follow(true));
    this.#scroller.addEventListener("scroll", () => this.#showJump(), { passive: true });
    for (const text of SUGGESTIONS) this.#suggest(text);
    // What a response waits for.
    onModels(() => this.#running.has(this.#shown) && this.#throttle.request());
    onChangeElsewhere((id, kept) => this.#takeOver(id, kept));
  }

  /** Load the kept conversations, and show the one before a reload; the chat works before, and without any. */
  async load() {
    const id = session.get(SHOWN);
    try {
      // One that has begun meanwhile stays the first.
      this.#conversations.push(...await loadAll());
    } catch {
      this.#showKept(false);
    }
    const shown = this.#conversations.find((conversation) => conversation.id === id);
    if (shown && !this.#shown.messages.length) this.show(shown);
    this.#showList();
  }

  show(conversation) {
    this.#shown = conversation;
    session.set(SHOWN, conversation.id);
    this.#renderAnew();
    this.#follow(true);
    this.onNavigate();
    $("prompt").focus();
  }

  /** Stop the shown conversation's response; false if there is none. */
  stop() {
    const controller = this.#running.get(this.#shown);
    controller?.abort();
    return controller !== undefined;
  }

  #suggest(text) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => this.#send(userMessage(text)));
    const item = document.createElement("li");
    item.append(button);
    $("suggestions").append(item);
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  }

  #fitPrompt() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  }

  async #submit(event) {
    event.preventDefault();
    const text = () => $("prompt").value.trim();
    if (!await this.#attachments.isReady(text) || this.#running.has(this.#shown)) return;
    const message = userMessage(text(), this.#attachments.take());
    $("prompt").value = "";
    this.#fitPrompt();
    this.#send(message);
  }

  #send(message) {
    const conversation = this.#shown;
    if (!this.#conversations.includes(conversation)) this.#conversations.unshift(conversation);
    session.set(SHOWN, conversation.id);
    conversation.title ||= titleOf(message.content || "Images");
    conversation.messages.push(message);
    this.#write();
  }

  /** Replace a message and all after it; the model goes on from there. */
  #restart(message, ...replacement) {
    this.stop();
    const { messages } = this.#shown;
    messages.splice(messages.indexOf(message), Infinity, ...replacement);
    this.#write();
  }

  #regenerate(message) {
    const isLast = this.#shown.messages.at(-1) === message;
    if (isLast || confirm("Replace this response and all that follows?")) this.#restart(message);
  }

  #proceed(message) {
    this.stop();
    return this.#generate(message);
  }

  #respond(message, call, text) {
    const { messages } = this.#shown;
    messages.push(toolMessage(call.id, text));
    if (this.#unansweredCalls(message).length) this.#render();
    else this.#write();
  }

  #unansweredCalls(message) {
    const later = this.#shown.messages.slice(this.#shown.messages.indexOf(message) + 1);
    if (later.some(({ role }) => role !== "tool")) return [];
    const answered = new Set(later.map(({ callId }) => callId));
    return message.calls.filter(({ id }) => !answered.has(id));
  }

  #write() {
    const message = assistantMessage();
    this.#shown.messages.push(message);
    return this.#generate(message);
  }

  async #generate(message) {
    const conversation = this.#shown;
    const controller = new AbortController();
    this.#running.set(conversation, controller);
    this.#announcer.begin(message.content.length);
    let kept = 0;
    const onChange = () => {
      if (performance.now() - kept > SAVE_INTERVAL) {
        kept = performance.now();
        this.#keep(conversation);
      }
      if (conversation !== this.#shown) return;
      this.#throttle.request();
      this.#announcer.update(message.content);
    };
    const ended = generate(conversation.messages, message, controller.signal, onChange);
    this.#render();
    this.#follow(true);
    await ended;
    if (this.#running.get(conversation) === controller) this.#running.delete(conversation);
    this.#keep(conversation);
    this.#end(conversation, message);
  }

  #end(conversation, message) {
    // One that was replaced meanwhile says nothing more.
    if (!conversation.messages.includes(message)) return;
    if (conversation !== this.#shown) return this.#showList();
    this.#throttle.request();
    const outcome = { done: "The response is complete.", stopped: "Stopped.", failed: message.error };
    this.#announcer.end(message.content, outcome[message.status]);
    if (message.status !== "failed") return;
    if (message.errorStatus === 401) openSettings(message.error);
    // The server has another one since the page was opened.
    if (message.errorStatus === 404) this.onUnknownModel();
  }

  async #keep(conversation) {
    conversation.updated = Date.now();
    // One that was deleted meanwhile does not come back.
    if (!this.#conversations.includes(conversation)) return;
    await save(conversation).then(() => this.#showKept(true), () => this.#showKept(false));
  }

  #showKept(isKept) {
    setText($("kept"), isKept ? "Kept in this browser only." : "Not kept: this browser’s storage is blocked or full.");
  }

  /** Show a conversation as another tab has left it, unless the model writes it here. */
  #takeOver(id, kept) {
    const known = this.#conversations.find((conversation) => conversation.id === id);
    if (this.#running.has(known)) return;
    const isShown = known === this.#shown;
    if (!kept) {
      this.#conversations = this.#conversations.filter((other) => other !== known);
      if (isShown) this.#shown = newConversation();
    } else if (known) Object.assign(known, kept);
    else this.#conversations.unshift(kept);
    if (isShown) this.#renderAnew();
    else this.#showList();
  }

  #remove(conversation) {
    this.#running.get(conversation)?.abort();
    this.#conversations = this.#conversations.filter((other) => other !== conversation);
    remove(conversation.id).catch(() => {});
    if (conversation === this.#shown) this.show(newConversation());
    else {
      this.#showList();
      $("new-chat").focus();
    }
  }

  #renderAnew() {
    this.#views.clear();
    $("message-list").replaceChildren();
    this.#render();
  }

  #render() {
    const follows = this.#isNearEnd();
    const { messages } = this.#shown;
    const list = $("message-list");
    const hadFocus = list.contains(document.activeElement);
    for (const [message, view] of this.#views) {
      if (messages.includes(message)) continue;
      view.element.remove();
      this.#views.delete(message);
    }
    for (const message of messages) {
      if (this.#views.has(message)) this.#views.get(message).update();
      else {
        const view = viewOf(message, this.#actions);
        this.#views.set(message, view);
        list.append(view.element);
      }
    }
    const isRunning = this.#running.has(this.#shown);
    $("welcome").hidden = messages.length > 0;
    this.#swapButtons(isRunning, hadFocus && !list.contains(document.activeElement));
    this.#follow(follows);
    this.#showList();
  }

  /** `lostFocus`: what had the focus is gone from the messages. */
  #swapButtons(isRunning, lostFocus) {
    const isSwapped = $("stop").hidden === isRunning;
    const takesFocus = lostFocus || (isSwapped && [$("stop"), $("send")].includes(document.activeElement));
    $("stop").hidden = !isRunning;
    $("send").hidden = isRunning;
    if (takesFocus) $(isRunning ? "stop" : "prompt").focus();
  }

  #showList() {
    this.#list.update(this.#conversations, this.#shown, (conversation) => this.#running.has(conversation));
    setText($("to-chat"), this.#running.size ? "Chat …" : "Chat");
  }

  #isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #follow(follows) {
    if (follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#showJump();
  }

  #showJump() {
    $("to-latest").hidden = this.#isNearEnd();
  }
}
