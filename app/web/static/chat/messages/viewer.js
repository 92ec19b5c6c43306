// A dialog that shows an image or a text in full.

import { $, iconButton } from "../../dom.js";

export function view(label, content) {
  const dialog = $("viewer");
  dialog.setAttribute("aria-label", label);
  dialog.replaceChildren(content, iconButton("delete", "Close"));
  // A click in a text selects.
  dialog.onclick = ({ target }) => target.closest("pre") || dialog.close();
  dialog.showModal();
}
