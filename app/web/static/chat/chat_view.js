// The chat: the shown conversation, and those in which the model still writes.

import { $, h, setText } from "../dom.js";
import { modelOf, onModels } from "../models.js";
import { settings } from "../settings.js";
import { openSettings } from "../settings_dialog.js";
import { session } from "../storage.js";
import { Announcer } from "./announcer.js";
import { CallRunner } from "./call_runner.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversations/conversation_list.js";
import {
  assistantMessage, attachedTo, bothOf, choose, loadAll, newConversation, onChangeElsewhere, remove, save, serverToolMessage, titleOf,
  toolMessage, unansweredCalls, userMessage,
} from "./conversations/conversations.js";
import { factsOf, linkTo, readLink } from "./conversations/share.js";
import { exportAll, importAll } from "./conversations/transfer.js";
import { generate } from "./generation.js";
import { MessageList } from "./messages/message_list.js";
import { Throttle } from "./throttle.js";

// Milliseconds between two times that a growing conversation is kept.
const SAVE_INTERVAL = 1000;
// Where the tab keeps which conversation it shows.
const SHOWN = "conversation";

export class ChatView {
  #conversations = [];
  #shown = newConversation();
  #running = new Map(); // AbortControllers, by conversation
  #stops = new WeakMap(); // AbortControllers, by message
  #calls = new CallRunner();
  #isFromLink = false;
  #announcer = new Announcer($("announcer"));
  #throttle = new Throttle(() => this.#render());
  #list = new ConversationList($("conversations"), {
    show: (conversation) => this.show(conversation),
    save: (conversation) => exportAll([conversation]),
    remove: (conversation) => this.#remove(conversation),
  });
  #composer = new Composer({
    send: (text, attached) => this.#send(userMessage(text, attached)),
    canSend: () => !this.#running.has(this.#shown),
    sent: () => attachedTo(this.#shown),
  });
  #messages = new MessageList({
    edit: (message, text, attached) => this.#restart(message, userMessage(text, attached)),
    regenerate: (message) => this.#regenerate(message),
    proceed: (message) => this.#proceed(message),
    respond: (message, call, text) => this.#respond(message, call, text),
    unansweredCalls: (message) => unansweredCalls(this.#shown, message),
    decide: (message, call, decision) => {
      this.#calls.decide(call, decision);
      this.#call(this.#shown, message);
    },
    stateOf: (call) => this.#calls.stateOf(call),
    stop: (message) => this.#stops.get(message)?.abort(),
    choose: (message, chosen) => this.#choose(message, chosen),
    link: (text) => this.#linkTo(text),
  });

  constructor({ onNavigate, onUnknownModel }) {
    this.onNavigate = onNavigate;
    this.onUnknownModel = onUnknownModel;
    $("new-chat").addEventListener("click", () => this.show(newConversation()));
    $("stop").addEventListener("click", () => this.stop());
    $("export").addEventListener("click", () => exportAll(this.#conversations));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import($("import-file").files[0]));
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
    if (shown && !this.#shown.messages.length && !this.#isFromLink) this.show(shown);
    this.#showList();
  }

  show(conversation) {
    this.#shown = conversation;
    session.set(SHOWN, conversation.id);
    this.#renderAnew();
    this.#messages.follow();
    this.onNavigate();
    $("prompt").focus();
  }

  /** Fill in the prompt of a link, in a conversation of its own; nothing is sent. */
  openLink(hash) {
    try {
      const { prompt, given } = readLink(hash);
      const conversation = newConversation();
      this.#isFromLink = true;
      if (given) conversation.given = given;
      this.show(conversation);
      this.#composer.fill(prompt);
    } catch (error) {
      this.show(newConversation());
      setText($("given"), `The link is ignored: ${error.message}.`);
    }
  }

  #linkTo(text) {
    try {
      return linkTo(text, this.#shown.given);
    } catch (error) {
      setText($("given"), error.message);
      return null;
    }
  }

  #showGiven() {
    const { given } = this.#shown;
    const drop = () => {
      delete this.#shown.given;
      this.#keep(this.#shown);
      this.#showGiven();
      $("prompt").focus();
    };
    $("given").replaceChildren(...(given ? [`From a link or a file: ${factsOf(given)} `,
      h("button", { type: "button", text: "Use my own settings", on: { click: drop } })] : []));
  }

  async #import(file) {
    $("import-file").value = ""; // the same one may be picked again
    let news;
    try {
      const added = await importAll(file);
      this.#conversations.unshift(...added);
      await Promise.all(added.map((conversation) => this.#keep(conversation)));
      news = `${added.length} imported.`;
    } catch (error) {
      news = `Not imported: ${error.message}.`;
    }
    setText($("transfer-news"), news);
    this.#showList();
  }

  /** Stop the shown conversation's response; false if there is none. */
  stop() {
    const controller = this.#running.get(this.#shown);
    controller?.abort();
    return controller !== undefined;
  }

  #send(message) {
    const conversation = this.#shown;
    if (!this.#conversations.includes(conversation)) this.#conversations.unshift(conversation);
    session.set(SHOWN, conversation.id);
    conversation.title ||= titleOf(message.content || message.files[0]?.name || "Images");
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
    const place = this.#shown.messages.find((one) => bothOf(one).includes(message));
    return this.#generate(this.#shown, place, [message]);
  }

  /** Go on with one of two messages. */
  #choose(message, chosen) {
    this.stop();
    choose(this.#shown, message, chosen);
    this.#keep(this.#shown);
    this.#renderAnew();
    $("prompt").focus();
  }

  #respond(message, call, text) {
    const { messages } = this.#shown;
    messages.push(toolMessage(call.id, text));
    if (unansweredCalls(this.#shown, message).length) this.#render();
    else this.#write();
  }

  /** Once all calls of servers' tools are decided, make them; once each call has a result, the model goes on. */
  async #call(conversation, message) {
    const calls = unansweredCalls(conversation, message).filter(({ server }) => server);
    const asked = calls.filter((call) => this.#calls.stateOf(call) === "asked");
    if (!calls.length || asked.length || this.#running.has(conversation)) {
      if (asked.length) this.#announcer.say(`The model asks to call ${asked.map(({ name }) => name).join(", ")}.`);
      return this.#render();
    }
    const controller = new AbortController();
    this.#running.set(conversation, controller);
    for await (const [call, result] of this.#calls.results(calls, controller.signal, () => this.#render())) {
      conversation.messages.push(serverToolMessage(call, result));
      this.#keep(conversation);
    }
    if (this.#running.get(conversation) === controller) this.#running.delete(conversation);
    const isDone = !controller.signal.aborted && !unansweredCalls(conversation, message).length;
    if (isDone && this.#conversations.includes(conversation)) return this.#write(conversation);
    if (controller.signal.aborted) this.#announcer.say("Stopped.");
    this.#render();
  }

  #write(conversation = this.#shown) {
    const message = assistantMessage();
    const other = settings.compare !== settings.model && modelOf(settings.compare)?.id;
    if (other) {
      message.asked = settings.model;
      message.rival = { ...assistantMessage(), asked: other };
    }
    conversation.messages.push(message);
    return this.#generate(conversation, message, bothOf(message));
  }

  /** Let the models write `messages`: the one at `place`, its rival, or both. */
  async #generate(conversation, place, messages) {
    const controller = new AbortController();
    this.#running.set(conversation, controller);
    if (conversation === this.#shown) this.#announcer.begin(place.content.length);
    let kept = 0;
    const onChange = () => {
      if (performance.now() - kept > SAVE_INTERVAL) {
        kept = performance.now();
        this.#keep(conversation);
      }
      if (conversation !== this.#shown) return;
      this.#throttle.request();
      // Two at once cannot be listened to.
      if (!place.rival) this.#announcer.update(place.content);
    };
    const ended = messages.map((message) => {
      const own = new AbortController();
      this.#stops.set(message, own);
      return generate(conversation, place, message, AbortSignal.any([controller.signal, own.signal]), onChange);
    });
    this.#render();
    if (conversation === this.#shown) this.#messages.follow();
    await Promise.all(ended);
    if (this.#running.get(conversation) === controller) this.#running.delete(conversation);
    this.#keep(conversation);
    for (const message of messages) this.#end(conversation, place, message);
    if (!place.rival && place.status === "done" && conversation.messages.includes(place)) this.#call(conversation, place);
  }

  #end(conversation, place, message) {
    // One that was replaced meanwhile says nothing more.
    if (!conversation.messages.includes(place)) return;
    if (conversation !== this.#shown) return this.#showList();
    this.#throttle.request();
    const outcome = { done: "The response is complete.", stopped: "Stopped.", failed: message.error };
    if (place.rival) this.#announcer.say("The responses have ended.");
    else this.#announcer.end(message.content, outcome[message.status]);
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
    this.#showGiven();
    this.#messages.clear();
    this.#render();
  }

  #render() {
    const lostFocus = this.#messages.update(this.#shown.messages);
    this.#composer.swapButtons(this.#running.has(this.#shown), lostFocus);
    this.#showList();
  }

  #showList() {
    this.#list.update(this.#conversations, this.#shown, (conversation) => this.#running.has(conversation));
    setText($("to-chat"), this.#running.size ? "Chat …" : "Chat");
  }
}
