// Server-sent events from `fetch`, which unlike EventSource can send keys and bodies.

// Milliseconds.  The server sends a comment every 10 seconds at least.
const SILENCE_LIMIT = 45_000;

export class ConnectionLost extends Error {}

/**
 * Yield the data of each event of a response.
 *
 * Throws ConnectionLost if the connection breaks, or is silent for too long.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await withinLimit(reader.read());
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
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
  const lines = event.split("\n").filter((line) => line.startsWith("data: "));
  return lines.length ? lines.map((line) => line.slice(6)).join("\n") : null;
}

async function withinLimit(promise) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ConnectionLost("the server has gone silent")), SILENCE_LIMIT);
  });
  try {
    return await Promise.race([promise, silence]);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ConnectionLost) throw error;
    throw new ConnectionLost("the connection was lost");
  } finally {
    clearTimeout(timer);
  }
}
