// The list of conversations at the side.

import { arrange, h, iconButton, setText } from "../../dom.js";

export class ConversationList {
  #element;
  #actions;
  #items = new Map(); // by conversation

  /** `actions`: show(conversation), save(conversation), remove(conversation). */
  constructor(element, actions) {
    this.#element = element;
    this.#actions = actions;
  }

  update(conversations, shown, isRunning) {
    arrange(this.#element, this.#items, conversations, (conversation) => this.#itemOf(conversation));
    for (const [conversation, { element }] of this.#items) {
      const button = element.firstElementChild;
      setText(button, conversation.title);
      button.classList.toggle("running", isRunning(conversation));
      if (conversation === shown) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  #itemOf(conversation) {
    const remove = () => {
      if (confirm(`Delete “${conversation.title}”?`)) this.#actions.remove(conversation);
    };
    return { element: h("li", {},
      h("button", { type: "button", on: { click: () => this.#actions.show(conversation) } }),
      iconButton("down", `Export ${conversation.title}`, () => this.#actions.save(conversation)),
      iconButton("delete", `Delete ${conversation.title}`, remove)) };
  }
}
