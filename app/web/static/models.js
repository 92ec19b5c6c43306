// The models of the server: what each is, and where it is between the disk and the device.

import { listModels, watchModels } from "./api.js";
import { Feed } from "./feed.js";

const GIB = 2 ** 30;

let cards = []; // of `/v1/models`, the default first
let isListed = false;
let isStale = true; // changes were missed
let listing = null;
let isDue = false; // again after that
const listeners = [];

// A server that has no such feed is asked for the list only.
const feed = new Feed(watchModels, take, (fault) => { isStale ||= Boolean(fault); });

export const models = () => cards;
export const modelOf = (id) => cards.find((card) => card.id === id);

/** Whether the server was asked; it may have given no answer. */
export const areModelsListed = () => isListed;

/** Call `listener` after each change. */
export const onModels = (listener) => listeners.push(listener);

/** Follow the states of the models, or not. */
export function watchStates(isWatched) {
  if (isWatched === feed.isRunning) return;
  if (isWatched) feed.start();
  else feed.stop();
}

/** Ask for all that is known of the models; rejects where that is refused. */
export function refreshModels() {
  isDue = listing !== null;
  listing ??= list().finally(() => {
    listing = null;
    if (isDue) refreshModels().catch(() => {});
  });
  return listing;
}

async function list() {
  try {
    cards = await listModels();
  } finally {
    isListed = true;
    tell();
  }
}

function take({ model, ...status }) {
  const card = modelOf(model);
  // What it takes, and until when it stays, is in the list only.
  if (isStale || wordOf(card) !== wordOf({ status })) refreshModels().catch(() => {});
  isStale = false;
  if (!card) return;
  for (const each of cards) if (each === card || each.parent === model) each.status = status;
  tell();
}

function tell() {
  for (const listener of listeners) listener();
}

/** "unloaded", "loading", "loaded", "draining" or "failed"; undefined where the server does not say. */
export const wordOf = (card) => (card?.status?.failed ? "failed" : card?.status?.value);

/** The state of a model. */
export const stateText = (card) =>
  (wordOf(card) === "loading" ? `loading ${percent(card)} %` : wordOf(card) ?? "");

export const percent = ({ status }) => Math.floor(100 * (status.progress ?? 0));

/** Whether a model takes images; undefined where the server does not say. */
export function takesImages(card) {
  const [kinds, words] = [card?.architecture?.input_modalities, card?.capabilities];
  return kinds || words ? Boolean(kinds?.includes("image") || words?.includes("vision")) : undefined;
}

/** What is known of a model besides its state and its memory. */
export function factsOf({ capabilities, pinned, expires_at: expires }) {
  const time = expires && new Date(expires * 1000).toLocaleTimeString([], { timeStyle: "short" });
  return [
    capabilities?.filter((name) => name !== "completion").join(", "),
    pinned && "pinned",
    time && `unloads at ${time} if idle`,
  ].filter(Boolean);
}

export const bytesOf = ({ memory }) => Object.values(memory ?? {}).reduce((a, b) => a + b, 0);

/** Bytes in GiB. */
export function gib(bytes) {
  const number = bytes / GIB;
  return `${number < 10 ? Number(number.toPrecision(2)) : Math.round(number)} GiB`;
}

/** What a request for a model waits for; empty unless the model is to be loaded for it. */
export function waitFor(id) {
  const card = modelOf(id);
  if (wordOf(card) === "loading") return `Loading ${id}, ${percent(card)} % …`;
  return wordOf(card) === "unloaded" ? `Waiting for ${id} to be loaded …` : "";
}
