// The page: what is typed becomes jobs, jobs become cards, and the server says how it is doing.

import { call, Refused } from "./api.js";
import { Card } from "./card.js";
import { make, seconds, wait } from "./dom.js";
import { Form, Wrong } from "./form.js";
import { begin } from "./jobs.js";

const STATUS_EVERY_MS = 3000;

const at = (id) => document.getElementById(id);
const gallery = at("gallery");
const active = new Set();

// What is said beside the form is seen and read out; what is told is read out only, by those who do not see the cards.
function say(text, isBad = false) {
  at("said").textContent = text;
  at("said").classList.toggle("bad", isBad);
}

function tell(text) {
  at("told").textContent = text;
}

const form = new Form(say);

const page = {
  say,
  tell,
  qualities: (model) => form.qualities(model),
  useSeed: (seed) => form.useSeed(seed),
  began(job) {
    active.add(job);
    renew();
  },
  ended(job) {
    active.delete(job);
    renew();
  },
  removed(card) {
    const next = card.element.nextElementSibling ?? card.element.previousElementSibling;
    card.element.remove();
    at("empty").hidden = gallery.childElementCount > 0;
    (next?.querySelector("h3") ?? at("pictures")).focus({ preventScroll: true });
  },
};

// The models are there, or will be.

let loading = null;

/** Whether the form has what the server offers; waits while models are loaded. */
function load() {
  if (form.info) return Promise.resolve(true);
  loading ??= untilReady().finally(() => {
    loading = null;
  });
  return loading;
}

async function untilReady() {
  for (let waited = false; ; waited = true) {
    const state = await readiness();
    try {
      if (state === "ready" || state === "failed") {
        const info = await call("/api/info");
        form.fill(info);
        at("version").textContent = info.version;
        if (waited) say("The models are loaded.");
        renew();
        return true;
      }
      say(state === null ? "The server does not answer. The page tries again." : "The models are being loaded.", state === null);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      say(error.message, true);
      if (error.status !== 503 && error.status !== 0) return false;
    }
    await wait(state === "not ready" ? 1000 : 3000);
  }
}

async function readiness() {
  try {
    return (await (await fetch("/readyz")).json()).status;
  } catch {
    return null;
  }
}

// Drawing.

async function draw() {
  try {
    if (!(await load())) return;
    const request = form.request();
    say("");
    const job = await begin(request, show);
    page.began(job);
  } catch (error) {
    if (error instanceof Wrong) {
      error.field.setAttribute("aria-invalid", "true");
      if (at("more").contains(error.field)) at("more").open = true;
      error.field.focus();
    } else if (!(error instanceof Refused)) {
      throw error;
    }
    say(error.message, true);
    // A server that was started anew may have other models.
    if (error.status === 503) {
      form.info = null;
      load();
    }
  }
}

/** A card for each picture of a job, the first of them first; what becomes of the job is told to them. */
function show(job) {
  const cards = job.seeds.map((seed, index) => new Card(page, job.request, seed, job, index));
  const many = cards.length > 1 ? `${cards.length} pictures` : "The picture";
  gallery.prepend(...cards.map(({ element }) => element));
  at("empty").hidden = true;
  tell(cards.length > 1 ? `${many} are in the queue.` : `${many} is in the queue.`);
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  cards[0].element.scrollIntoView({ block: "nearest", behavior: isStill ? "auto" : "smooth" });
  return {
    begun: () => cards.forEach((card) => card.begun()),
    progress: (share) => cards.forEach((card) => card.progress(share)),
    step: (number, said) => cards[number].step(said),
    picture: (number, picture) => cards[number].done(picture),
    over(said) {
      page.ended(job);
      for (const card of cards) card.over(said);
      if (said.state === "done") tell(`${many} ${cards.length > 1 ? "are" : "is"} drawn: ${job.request.prompt}`);
      else if (said.state === "cancelled") tell("The drawing was cancelled.");
      else say(`Something was not drawn. ${said.error ?? ""}`, true);
    },
  };
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  draw();
});

addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  draw();
});

// How the server is doing.

let timer = 0;

function renew() {
  clearTimeout(timer);
  timer = setTimeout(status, 50);
  document.title = active.size ? "Drawing · rocm-sd" : "rocm-sd";
}

async function status() {
  clearTimeout(timer);
  if (document.visibilityState !== "visible" || !form.info) return;
  try {
    const { queued, drawing, batch, pictures_a_minute: rate, seconds_a_picture: each } = await call("/api/status", { quiet: true });
    const parts = [[queued, "waiting"], [drawing, "drawing"]];
    if (drawing && batch) parts.push([batch, "in the last step"]);
    if (rate !== null) parts.push([rate.toFixed(1), "pictures a minute"]);
    if (each !== null) parts.push([seconds(each), "a picture"]);
    at("status").replaceChildren(...parts.map(([value, what]) => make("li", {}, make("b", { text: value }), ` ${what}`)));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    at("status").replaceChildren(make("li", { text: error.status === 0 ? "The server does not answer." : error.message }));
  }
  clearTimeout(timer);
  timer = setTimeout(status, STATUS_EVERY_MS);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") status();
});

load();
