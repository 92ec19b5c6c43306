// Images: from the files that a user has to what is kept, sent and shown.

import { h } from "../../dom.js";
import { view } from "./viewer.js";

// Pixels.  Models look at no more, and a request has all images of its conversation.
const MAX_SIDE = 2048;
// Bytes from which on an image is a JPEG: it is a photo, or like one.
const MAX_PNG = 1 << 19;
const JPEG_QUALITY = 0.8;

/** A file's image upright, scaled down if it is large, without what else is in the file; rejects if there is none. */
export async function readImage(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  // What is transparent is seen on paper: a JPEG and some models would make it black.
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const encoded = (type) => new Promise((resolve) => canvas.toBlob(resolve, type, JPEG_QUALITY));
  const png = file.type === "image/jpeg" ? null : await encoded("image/png");
  return png && png.size <= MAX_PNG ? png : encoded("image/jpeg");
}

export const dataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** A button for each image, which shows it in full. */
export const thumbnails = (blobs) => blobs.map((blob, i) => {
  const label = `Image ${i + 1} of ${blobs.length}`;
  const on = { click: () => view(label, pictureOf(blob, label)) };
  return h("button", { type: "button", class: "thumb", "aria-haspopup": "dialog", on }, pictureOf(blob, label));
});

function pictureOf(blob, alt) {
  const src = URL.createObjectURL(blob);
  const forget = () => URL.revokeObjectURL(src);
  return h("img", { src, alt, draggable: "false", on: { load: forget, error: forget } });
}
