// The browser's storages.  Where they are blocked or full, a value lasts as long as the page.

class Store {
  #name;
  #memory = new Map(); // what the browser does not keep

  constructor(name) {
    this.#name = name;
  }

  /** The value of a key, or null. */
  get(key) {
    return this.#memory.get(key) ?? this.#attempt((storage) => storage.getItem(key)) ?? null;
  }

  set(key, value) {
    this.remove(key);
    const isKept = this.#attempt((storage) => {
      storage.setItem(key, value);
      return true;
    });
    if (!isKept) this.#memory.set(key, value);
  }

  remove(key) {
    this.#memory.delete(key);
    this.#attempt((storage) => storage.removeItem(key));
  }

  #attempt(act) {
    try {
      return act(window[this.#name]);
    } catch {
      return undefined;
    }
  }
}

/** Kept until the user deletes it, and seen by all tabs. */
export const local = new Store("localStorage");
/** Kept until the tab is closed. */
export const session = new Store("sessionStorage");
