// Runs the page's readers of what a server sends: a line of JSON in, a line out.

import { createInterface } from "node:readline";
import { events } from "../../app/web/static/sse.js";
import { lex } from "../../app/web/static/chat/messages/markdown.js";

const KINDS = { events: readEvents, markdown: lexPieces };

/** The data of the events in a response that comes in pieces, each in base64. */
async function readEvents(pieces) {
  const body = new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(Buffer.from(piece, "base64"));
      controller.close();
    },
  });
  const found = [];
  for await (const data of events(new Response(body))) found.push(data);
  return found;
}

/** Lex what has come of a text after each of its pieces, as the page does while it grows. */
function lexPieces(pieces) {
  let text = "";
  for (const piece of pieces) {
    text += piece;
    try {
      lex(text, Object.create(null));
    } catch (error) {
      // Nested deeper than the stack allows: the page shows it as it is.
      if (!(error instanceof RangeError)) throw error;
    }
  }
  return null;
}

for await (const line of createInterface({ input: process.stdin })) {
  const { kind, pieces } = JSON.parse(line);
  const before = process.cpuUsage();
  const answer = await KINDS[kind](pieces);
  const { user, system } = process.cpuUsage(before);
  console.log(JSON.stringify({ answer, seconds: (user + system) / 1e6 }));
}
