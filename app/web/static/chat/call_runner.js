// The calls of tools of servers: what the user has decided of each, and their results.

import { allow, callTool, isAllowed } from "../mcp/tools.js";

const DENIED = "The user has denied this call.";

export class CallRunner {
  #states = new WeakMap(); // by call: "allowed", "denied" or "running"

  /** Say "once", "always" or "denied" of a call. */
  decide(call, decision) {
    if (decision === "always") allow(call.name);
    this.#states.set(call, decision === "denied" ? "denied" : "allowed");
  }

  /** "asked", "allowed", "denied" or "running". */
  stateOf(call) {
    return this.#states.get(call) ?? (isAllowed(call.name) ? "allowed" : "asked");
  }

  /** Yield [call, {text, images}] one after the other; ends early, and asks again, when aborted. */
  async* results(calls, signal, onChange) {
    try {
      for (const call of calls) {
        const isDenied = this.stateOf(call) === "denied";
        if (!isDenied) this.#states.set(call, "running");
        onChange();
        const result = isDenied ? { text: DENIED, images: [] } : await callTool(call, signal);
        if (signal.aborted) return;
        yield [call, result];
      }
    } catch (error) {
      if (!signal.aborted) throw error;
    } finally {
      for (const call of calls) this.#states.delete(call);
    }
  }
}
