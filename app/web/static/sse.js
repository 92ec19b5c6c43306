// Server-sent events from `fetch`, which unlike EventSource can send keys and bodies.

// Milliseconds.  The server sends a comment every 10 seconds at least.
const SILENCE_LIMIT = 45_000;

export class ConnectionLost extends Error {}

/**
 * Yield the data of each event of a response.
 *
 * Throws ConnectionLost if the connection breaks, is silent for `silence` milliseconds, or sends an event of more
 * than `most` characters.
 */
export async function* events(response, silence = SILENCE_LIMIT, most = Infinity) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await withinLimit(reader.read(), silence);
      if (done) return;
      const parts = (rest + value).split(/\r\n\r\n|\n\n/);
      rest = parts.pop();
      if (rest.length > most) throw new ConnectionLost("the server has sent too much");
      for (const part of parts) {
        const data = dataOf(part);
        if (data !== null) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}

async function withinLimit(promise, silence) {
  let timer;
  const silent = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ConnectionLost("the server has gone silent")), silence);
  });
  try {
    return await Promise.race([promise, silent]);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ConnectionLost) throw error;
    throw new ConnectionLost("the connection was lost");
  } finally {
    clearTimeout(timer);
  }
}
