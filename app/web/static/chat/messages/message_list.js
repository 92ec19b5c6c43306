// The messages of the shown conversation, which the view follows while they grow.

import { $ } from "../../dom.js";
import { viewOf } from "./message_view.js";

// Pixels from the end, within which the view follows what is added.
const NEAR = 80;

export class MessageList {
  #views = new Map(); // by message
  #scroller = $("messages");
  #list = $("message-list");
  #actions;

  /** `actions`: what the buttons of a message do. */
  constructor(actions) {
    this.#actions = actions;
    $("to-latest").addEventListener("click", () => this.follow());
    this.#scroller.addEventListener("scroll", () => this.#showJump(), { passive: true });
  }

  clear() {
    this.#views.clear();
    this.#list.replaceChildren();
  }

  /** Show these messages; return whether what had the focus is gone. */
  update(messages) {
    const isFollowed = this.#isNearEnd();
    const hadFocus = this.#list.contains(document.activeElement);
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
        this.#list.append(view.element);
      }
    }
    $("welcome").hidden = messages.length > 0;
    if (isFollowed) this.follow();
    else this.#showJump();
    return hadFocus && !this.#list.contains(document.activeElement);
  }

  /** Show the end. */
  follow() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#showJump();
  }

  #isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #showJump() {
    $("to-latest").hidden = this.#isNearEnd();
  }
}
