// What frames tell together: rates, and the states of each request over the last half minute.

// Seconds.
export const SPAN = 30;
const RATE_SPAN = 2;

/** The state of a lane: one of "waiting", "prefill", "decode", "preempted". */
export function stateOf({ status, num_preemptions: numPreemptions }) {
  if (status === "waiting") return numPreemptions ? "preempted" : "waiting";
  return status === "prefilling" ? "prefill" : "decode";
}

export class History {
  lanes = new Map(); // by the request's id: {id, spans: [{state, from, to}], latest, hasEnded}
  points = []; // {time, frame}, the oldest first
  rates = []; // {time, output, prefill} in tokens a second

  add(frame, time) {
    // Counts begin again with a new connection.
    const last = this.points.at(-1)?.frame;
    if (last && frame.counts.num_steps < last.counts.num_steps) this.points = [];
    this.points.push({ time, frame });
    this.points = this.points.filter((point) => point.time > time - SPAN);
    this.rates.push({ time, output: this.#rate("num_output_tokens"), prefill: this.#rate("num_prompt_tokens") });
    this.rates = this.rates.filter((rate) => rate.time > time - SPAN);
    this.#addLanes([...frame.running, ...frame.waiting], time);
  }

  #rate(name) {
    const now = this.points.at(-1);
    const before = this.points.find((point) => point.time >= now.time - RATE_SPAN);
    const seconds = now.time - before.time;
    return seconds ? (now.frame.counts[name] - before.frame.counts[name]) / seconds : 0;
  }

  /** Of the tokens of prompts in that time, or ever if there were none, the share that was cached. */
  hitRate() {
    const { stats: now } = this.points.at(-1).frame;
    const { stats: then } = this.points[0].frame;
    const numQueried = now.num_queried_tokens - then.num_queried_tokens;
    if (numQueried) return (now.num_hit_tokens - then.num_hit_tokens) / numQueried;
    return now.num_queried_tokens ? now.num_hit_tokens / now.num_queried_tokens : null;
  }

  #addLanes(requests, time) {
    const present = new Set();
    for (const request of requests) {
      present.add(request.id);
      const lane = this.lanes.get(request.id) ?? { id: request.id, spans: [], hasEnded: false };
      this.lanes.set(request.id, lane);
      lane.latest = request;
      const state = stateOf(request);
      const span = lane.spans.at(-1);
      if (span) span.to = time;
      if (span?.state !== state) lane.spans.push({ state, from: span ? time : time - Math.min(request.age, SPAN), to: time });
    }
    for (const lane of this.lanes.values()) {
      lane.hasEnded = !present.has(lane.id);
      if (lane.spans.at(-1).to < time - SPAN) this.lanes.delete(lane.id);
    }
  }
}
