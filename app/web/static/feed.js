// Frames of the server, while they are watched; a lost connection is opened again.

// Milliseconds.
const FIRST_PAUSE = 500;
const LAST_PAUSE = 10_000;

export class Feed {
  #open;
  #onFrame;
  #onState;
  #controller = null;

  /**
   * `open(signal)` yields frames until they end; `onState` gets a sentence for the user, empty while frames come,
   * and the status of a rejection.
   */
  constructor(open, onFrame, onState) {
    this.#open = open;
    this.#onFrame = onFrame;
    this.#onState = onState;
  }

  start() {
    this.stop();
    this.#controller = new AbortController();
    this.#run(this.#controller.signal);
  }

  stop() {
    this.#controller?.abort();
    this.#controller = null;
  }

  get isRunning() {
    return this.#controller !== null;
  }

  async #run(signal) {
    let pause = FIRST_PAUSE;
    this.#onState("Connecting …");
    while (!signal.aborted) {
      let fault = "The engine has stopped.";
      try {
        for await (const frame of this.#open(signal)) {
          if (signal.aborted) return;
          pause = FIRST_PAUSE;
          this.#onState("");
          this.#onFrame(frame);
        }
      } catch (error) {
        if (signal.aborted) return;
        fault = error.message.charAt(0).toUpperCase() + error.message.slice(1);
        // It would be rejected again: until the key or the model is another.
        if (error.status >= 400 && error.status < 500) return this.#onState(`${fault}.`, error.status);
      }
      this.#onState(`${fault.replace(/\.$/, "")}; trying again …`);
      await paused(pause, signal);
      pause = Math.min(pause * 2, LAST_PAUSE);
    }
  }
}

function paused(milliseconds, signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", resolve, { once: true });
  });
}
