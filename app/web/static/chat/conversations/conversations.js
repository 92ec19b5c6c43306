// Conversations: what they consist of, and IndexedDB, where they are kept.
//
// A message is {role: "user" | "assistant" | "tool", content, status}, and besides
//   of the user: images (Blobs), files: [{name, blob}]; older ones have none
//   of the assistant: reasoning, calls: [{id, name, arguments, server (which has the tool)}], error, finishReason,
//     usage, tokensPerSecond, firstTokenSeconds, reasoningSeconds, model, asked (the model that was asked), note,
//     isJson, rival (such a message of another model, which answers the same)
//   of a tool: callId, and of a server's: name, images
// `status` is "streaming", "done", "stopped" or "failed".

const NAME = "mlx-batch-server";
const STORE = "conversations";

let database = null;
const tabs = new BroadcastChannel(NAME);

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

async function run(mode, act) {
  const transaction = (await opened()).transaction(STORE, mode);
  const request = act(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    // Not the request's own success: whether there is room is known at the end.
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** The kept conversations, the latest first; what was streaming when the page closed was cut off. */
export async function loadAll() {
  const all = await run("readonly", (store) => store.getAll());
  const messages = all.flatMap((conversation) => conversation.messages);
  for (const message of messages.flatMap(bothOf)) {
    if (message.status === "streaming") {
      Object.assign(message, { status: "failed", error: "The page was closed meanwhile." });
    }
  }
  return all.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation) {
  await run("readwrite", (store) => store.put(conversation));
  tabs.postMessage(conversation.id);
}

export async function remove(id) {
  await run("readwrite", (store) => store.delete(id));
  tabs.postMessage(id);
}

/** Call `listener` with what another tab has kept: the id, and the conversation unless it is deleted. */
export function onChangeElsewhere(listener) {
  tabs.onmessage = async ({ data: id }) => listener(id, await run("readonly", (store) => store.get(id)));
}

export function newConversation() {
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), messages: [] };
}

/** A message, and the one of another model beside it. */
export const bothOf = (message) => (message.rival ? [message, message.rival] : [message]);

/** The images and files that requests of a conversation have. */
export const attachedTo = ({ messages }) => messages.filter(({ role }) => role === "user")
  .flatMap(({ images = [], files = [] }) => [...images, ...files]);

/** The calls of a message that have no result, and may still get one. */
export function unansweredCalls({ messages }, message) {
  const later = messages.slice(messages.indexOf(message) + 1);
  if (!messages.includes(message) || later.some(({ role }) => role !== "tool")) return [];
  const answered = new Set(later.map(({ callId }) => callId));
  return message.calls.filter(({ id }) => !answered.has(id));
}

/** Go on with one of the two of `message`, and with its model's of all before. */
export function choose({ messages }, message, chosen) {
  const isRival = message.rival === chosen;
  for (const other of messages.slice(0, messages.indexOf(message) + 1)) {
    const { rival } = other;
    delete other.rival;
    if (isRival && rival) Object.assign(other, rival);
  }
}

// `crypto.randomUUID` is there in secure contexts only.
const newId = () => `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;

export const userMessage = (content, { images = [], files = [] } = {}) =>
  ({ role: "user", content, images, files, status: "done" });
export const toolMessage = (callId, content) => ({ role: "tool", callId, content, status: "done" });
export const serverToolMessage = ({ id, name }, { text, images }) =>
  ({ role: "tool", callId: id, content: text, name, images, status: "done" });
export const assistantMessage = () =>
  ({ role: "assistant", content: "", reasoning: "", calls: [], status: "streaming" });

/** The title of a conversation without one: the beginning of its first message. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 48 ? `${line.slice(0, 47)}…` : line;
}
