// A job of the server: asked for, watched to its end, and its pictures kept as long as the page is open.

import { call, events, Refused } from "./api.js";
import { wait } from "./dom.js";

// A browser opens six connections to a server, and other calls need some: of further jobs the progress is asked for.
const STREAMS = 3;
const ASK_EVERY_MS = 1000;
const TRIES = 6;
const OVER = new Set(["done", "failed", "cancelled"]);

let streams = 0;
const running = new Set();
// Pictures by what they were drawn from, so that none is drawn again to be compared.
const drawn = new Map();

export function alreadyDrawn(request, seed, quality) {
  return drawn.get(name(request, seed, quality));
}

const starts = [];

/** A start picture is some megabytes of text: its number stands for it. */
function name({ image, ...request }, seed, quality) {
  if (!starts.includes(image)) starts.push(image);
  return JSON.stringify({ ...request, image: starts.indexOf(image), n: 1, seed, quality });
}

/**
 * Put a request into the queue; a Refused says why not. `listener` has begun(), step(number, {step, steps, preview}),
 * progress(of 1), picture(number, {url, seed, width, height, quality, seconds}) and over({state, error}).
 */
export async function begin(request, listen) {
  const { id, seeds } = await call("/api/jobs", { method: "POST", body: request });
  const job = new Job(id, seeds, request);
  job.listener = listen(job);
  running.add(job);
  job.follow().finally(() => running.delete(job));
  return job;
}

// Nobody would see them.
addEventListener("pagehide", (event) => {
  if (!event.persisted) for (const job of running) job.cancel();
});

class Job {
  constructor(id, seeds, request) {
    Object.assign(this, { id, seeds, request });
    this.asked = performance.now();
    this.began = null;
    this.pictures = seeds.map(() => null);
  }

  async cancel() {
    try {
      await call(`/api/jobs/${this.id}`, { method: "DELETE", outlives: true });
    } catch {
      // It is over, or its stream says what is wrong.
    }
  }

  async follow() {
    for (let tries = 0; tries < TRIES; tries += 1) {
      if (tries) await wait(400 * tries);
      try {
        await this.#turn();
        streams += 1;
        try {
          for await (const [kind, said] of events(`/api/jobs/${this.id}/events`)) {
            tries = 0;
            if (await this.#tell(kind, said)) return;
          }
        } finally {
          streams -= 1;
        }
      } catch (error) {
        if (error instanceof Refused && error.status >= 400 && error.status < 500) {
          this.listener.over({ state: "failed", error: error.message });
          return;
        }
      }
    }
    this.listener.over({ state: "failed", error: "The server does not answer any more." });
  }

  /** Until a stream is free, or only the pictures are left to be told. */
  async #turn() {
    while (streams >= STREAMS) {
      const { state, progress } = await call(`/api/jobs/${this.id}`);
      if (OVER.has(state)) return;
      this.#state(state);
      if (state === "drawing") this.listener.progress(progress);
      await wait(ASK_EVERY_MS);
    }
  }

  #state(state) {
    if (state === "drawing" && this.began === null) {
      this.began = performance.now();
      this.listener.begun();
    }
  }

  /** Whether it is over. */
  async #tell(kind, said) {
    if (kind === "state") this.#state(said.state);
    else if (kind === "step") this.listener.step(said.picture, said);
    else if (kind === "picture") await this.#keep(said);
    else if (kind === "over") {
      const waited = this.began === null ? 0 : (this.began - this.asked) / 1000;
      const seconds = said.state === "done" ? Math.max(0, said.seconds - waited) : null;
      for (const picture of this.pictures) if (picture) picture.seconds = seconds;
      this.listener.over({ ...said, seconds });
      return true;
    }
    return false;
  }

  async #keep({ picture: number, url, ...facts }) {
    if (this.pictures[number]) return;
    // The server forgets pictures after some time, the page does not.
    let kept = url;
    try {
      const response = await fetch(url);
      if (response.ok) kept = URL.createObjectURL(await response.blob());
    } catch {
      // The address itself is as good for now.
    }
    const picture = { ...facts, url: kept, seconds: null, together: this.seeds.length, uses: 0 };
    this.pictures[number] = picture;
    drawn.set(name(this.request, facts.seed, facts.quality), picture);
    this.listener.picture(number, picture);
  }
}

/** Whoever showed it does so no more: after the last one, its memory is the browser's again. */
export function letGo(picture) {
  picture.uses -= 1;
  if (picture.uses > 0) return;
  for (const [key, other] of drawn) if (other === picture) drawn.delete(key);
  if (picture.url.startsWith("blob:")) URL.revokeObjectURL(picture.url);
}
