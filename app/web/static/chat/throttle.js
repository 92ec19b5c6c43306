// Calls a function once a frame at most, and less often where it takes long.

// The share of the time that is left to everything else is three quarters.
const PAUSE = 3;

export class Throttle {
  #act;
  #isDue = false;
  #free = 0; // when it may run again

  constructor(act) {
    this.#act = act;
  }

  request() {
    if (this.#isDue) return;
    this.#isDue = true;
    const wait = this.#free - performance.now();
    if (wait > 0) setTimeout(() => this.#inFrame(), wait);
    else this.#inFrame();
  }

  #inFrame() {
    requestAnimationFrame(() => {
      this.#isDue = false;
      const began = performance.now();
      this.#act();
      const ended = performance.now();
      this.#free = ended + PAUSE * (ended - began);
    });
  }
}
