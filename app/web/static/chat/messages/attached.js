// What is attached to a message: {images: Blobs, files: [{name, blob}]}.

import { h, iconButton } from "../../dom.js";
import { chips } from "./files.js";
import { thumbnails } from "./images.js";

export const shownOf = ({ images = [], files = [] }) => [...thumbnails(images), ...chips(files)];

/** An item for each, with a button that takes it out; then `onRemove` is called with its place. */
export function removable(attached, onRemove) {
  const { images, files } = attached;
  const names = [...images.map((_, i) => `image ${i + 1} of ${images.length}`), ...files.map(({ name }) => name)];
  return shownOf(attached).map((shown, i) => h("li", {}, shown, iconButton("delete", `Remove ${names[i]}`, () => {
    if (i < images.length) images.splice(i, 1);
    else files.splice(i - images.length, 1);
    onRemove(i);
  })));
}
