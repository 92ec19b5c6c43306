// The list of conversations at the side.

import { h, iconButton, setText } from "../dom.js";

export class ConversationList {
  #element;
  #actions;
  #items = new Map(); // by conversation

  /** `actions`: show(conversation), remove(conversation). */
  constructor(element, actions) {
    this.#element = element;
    this.#actions = actions;
  }

  update(conversations, shown, isRunning) {
    for (const [conversation, item] of this.#items) {
      if (conversations.includes(conversation)) continue;
      item.remove();
      this.#items.delete(conversation);
    }
    conversations.forEach((conversation, i) => {
      const item = this.#itemOf(conversation);
      if (this.#element.children[i] !== item) this.#element.insertBefore(item, this.#element.children[i] ?? null);
      const button = item.firstElementChild;
      setText(button, conversation.title);
      button.classList.toggle("running", isRunning(conversation));
      if (conversation === shown) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
  }

  #itemOf(conversation) {
    if (!this.#items.has(conversation)) {
      const remove = () => {
        if (confirm(`Delete “${conversation.title}”?`)) this.#actions.remove(conversation);
      };
      this.#items.set(conversation, h("li", {},
        h("button", { type: "button", on: { click: () => this.#actions.show(conversation) } }),
        iconButton("delete", `Delete ${conversation.title}`, remove)));
    }
    return this.#items.get(conversation);
  }
}
