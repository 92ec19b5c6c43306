// Conversations as a file, and from one: nothing of a file is taken that this page has not written itself.

import { assistantMessage, bothOf, newConversation, titleOf } from "./conversations.js";
import { readFile } from "../messages/files.js";
import { dataUrl, readImage } from "../messages/images.js";
import { readGiven } from "./share.js";

const VERSION = 1;
// Bytes of a file; conversations of one, messages of one of these, images, files and calls of one of these.
const MAX_BYTES = 1 << 26;
const MAX_CONVERSATIONS = 1000;
const MAX_MESSAGES = 10_000;
const MAX_PARTS = 128;
// Bytes of what is around the conversations.
const ROOM = 64;

/** Let the user save conversations: as a file, or as several, each of which can be imported. */
export async function exportAll(conversations) {
  let parts = [];
  let numBytes = 0;
  for (const { title, created, given, messages } of conversations) {
    const written = { title, created, ...(given && { given }), messages: await Promise.all(messages.map(asWritten)) };
    const part = new Blob([JSON.stringify(written, null, 1)]);
    if (parts.length === MAX_CONVERSATIONS || (parts.length && numBytes + part.size > MAX_BYTES - ROOM)) {
      download(parts);
      parts = [];
      numBytes = 0;
    }
    parts.push(part);
    numBytes += part.size + 1;
  }
  download(parts);
}

function download(parts) {
  const content = [`{"version": ${VERSION}, "conversations": [`, ...parts.flatMap((part, i) => (i ? [",", part] : [part])), "]}"];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(content, { type: "application/json" }));
  link.download = parts.length === 1 ? "conversation.json" : "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function asWritten({ role, content, callId, name, reasoning, calls, model, asked, images, files, rival }) {
  return {
    role, content, callId, name, reasoning, model, asked,
    ...(calls && { calls: calls.map((call) => ({ id: call.id, name: call.name, arguments: call.arguments })) }),
    ...(images?.length && { images: await Promise.all(images.map(dataUrl)) }),
    ...(files?.length && { files: await Promise.all(files.map(async ({ name, blob }) => ({ name, data: await dataUrl(blob) }))) }),
    ...(rival && { rival: await asWritten(rival) }),
  };
}

/** The conversations of a file, as new ones; throws an Error that says what is wrong with it. */
export async function importAll(file) {
  if (file.size > MAX_BYTES) throw new Error(`it has more than ${MAX_BYTES >> 20} MiB`);
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch {
    throw new Error("it is not JSON");
  }
  if (data?.version !== VERSION) throw new Error(`its version is not ${VERSION}`);
  const read = [];
  for (const [i, item] of list(data.conversations, MAX_CONVERSATIONS, "conversations").entries()) {
    try {
      read.push(await conversationOf(item));
    } catch (error) {
      throw new Error(`conversation ${i + 1}: ${error.message}`);
    }
  }
  return read;
}

async function conversationOf(item) {
  const conversation = newConversation();
  conversation.title = titleOf(text(item, "title")) || "Imported";
  if (Number.isFinite(item.created)) conversation.created = item.created;
  const given = item.given === undefined ? null : readGiven(object(item.given, "given"));
  if (given) conversation.given = given;
  for (const message of list(item.messages, MAX_MESSAGES, "messages")) conversation.messages.push(await messageOf(message));
  return conversation;
}

async function messageOf(item) {
  object(item, "message");
  const { role } = item;
  const content = text(item, "content");
  if (role === "user") return { role, content, images: await imagesOf(item), files: await filesOf(item), status: "done" };
  if (role === "tool") {
    const name = item.name === undefined ? {} : { name: text(item, "name") };
    return { role, callId: text(item, "callId"), content, ...name, images: await imagesOf(item), status: "done" };
  }
  if (role !== "assistant") throw new Error("a role is none of user, assistant and tool");
  const message = { ...assistantMessage(), content, status: "done", calls: list(item.calls ?? [], MAX_PARTS, "calls").map(callOf) };
  for (const name of ["reasoning", "model", "asked"]) if (item[name] !== undefined) message[name] = text(item, name);
  if (item.rival !== undefined) {
    message.rival = await messageOf({ ...object(item.rival, "rival"), rival: undefined });
    if (bothOf(message).some((one) => one.role !== role || one.asked === undefined)) throw new Error("a rival is none");
  }
  return message;
}

const callOf = (item) =>
  ({ id: text(item, "id"), name: text(item, "name"), arguments: text(item, "arguments") });

/** The images, as the browser draws them anew. */
const imagesOf = ({ images = [] }) => partsOf(images, "images", (url) => readImage(blobOf(url)));

const filesOf = ({ files = [] }) => partsOf(files, "files", (item) =>
  readFile(new File([blobOf(item.data)], text(item, "name"))));

const partsOf = (items, name, read) => Promise.all(list(items, MAX_PARTS, name).map(async (item) => {
  try {
    return await read(item);
  } catch {
    throw new Error(`one of its ${name} is none`);
  }
}));

function blobOf(url) {
  const [head, data] = url.split(";base64,");
  const [, type] = /^data:(image\/png|image\/jpeg|text\/plain|application\/pdf)$/.exec(head);
  return new Blob([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], { type });
}

function list(value, most, name) {
  if (!Array.isArray(value)) throw new Error(`its ${name} are no list`);
  if (value.length > most) throw new Error(`it has more than ${most} ${name}`);
  return value;
}

function object(value, name) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error(`a ${name} is no object`);
  return value;
}

function text(item, name) {
  if (typeof object(item, "part")[name] !== "string") throw new Error(`a ${name} is no text`);
  return item[name];
}
