// The form: filled with what the server has, read as a request, and remembered.

import { capital, make } from "./dom.js";

const NAME = "rocm-sd.form";
const REMEMBERED = ["prompt", "negative", "model", "width", "height", "steps", "n", "guidance", "scheduler"];
const SHAPES = [[1, 1], [3, 4], [4, 3], [9, 16], [16, 9]];
const HINTS = {
  exact: "Nothing is approximated.",
  high: "Work is left out where it is hard to see.",
  balanced: "More work is left out: faster, and close to exact.",
};
const LARGEST_SEED = 2 ** 53;
// A photograph of more pixels or bytes is made smaller before it is sent.
const LESS_SIDE = 2048;

const at = (id) => document.getElementById(id);
const fields = Object.fromEntries([...REMEMBERED, "seed", "strength", "file"].map((id) => [id, at(id)]));

/** What is wrong with a field, in a sentence. */
export class Wrong extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export class Form {
  constructor(say) {
    this.say = say;
    this.info = null;
    this.image = null;
    const form = at("form");
    form.addEventListener("input", (event) => {
      event.target.removeAttribute("aria-invalid");
      this.#remember();
    });
    at("steps-slide").addEventListener("input", ({ target }) => {
      fields.steps.value = target.value;
      this.#remember();
    });
    fields.steps.addEventListener("input", () => this.#slideSteps());
    for (const side of [fields.width, fields.height]) side.addEventListener("input", () => this.#markShape());
    fields.model.addEventListener("change", () => this.#fillModel());
    fields.strength.addEventListener("input", () => this.#sayStrength());
    fields.file.addEventListener("change", () => this.#pick());
    at("start-remove").addEventListener("click", () => this.#dropStart());
    this.#sayStrength();
    // A prompt can be typed before the server is ready.
    const kept = remembered();
    for (const id of ["prompt", "negative", "steps", "n"]) if (kept[id]) fields[id].value = kept[id];
    this.#slideSteps();
  }

  get model() {
    return this.info.models.find(({ name }) => name === fields.model.value) ?? this.info.models[0];
  }

  qualities(name) {
    return this.info.models.find((model) => model.name === name)?.qualities ?? ["exact"];
  }

  fill(info) {
    const kept = remembered();
    this.info = info;
    fields.model.replaceChildren(...info.models.map(({ name }) => make("option", { value: name, text: name })));
    at("model-field").hidden = info.models.length < 2;
    const own = fields.scheduler.options[0];
    fields.scheduler.replaceChildren(own, ...info.schedulers.map((name) => make("option", { value: name, text: name })));
    fields.steps.max = info.limits.steps;
    fields.n.max = info.limits.pictures;
    at("steps-slide").max = Math.min(60, info.limits.steps);
    const isKnown = info.models.some(({ name }) => name === kept.model);
    if (isKnown) fields.model.value = kept.model;
    this.#fillModel(kept.quality);
    if (info.schedulers.includes(kept.scheduler)) fields.scheduler.value = kept.scheduler;
    if (isKnown) for (const id of ["width", "height", "guidance"]) if (kept[id]) fields[id].value = kept[id];
    this.#markShape();
    this.#slideSteps();
  }

  useSeed(seed) {
    fields.seed.value = seed;
    fields.seed.focus();
    fields.seed.select();
  }

  /** As POST /api/jobs takes it; a Wrong says what has to be changed first. */
  request() {
    const prompt = fields.prompt.value.trim();
    if (!prompt) throw new Wrong(fields.prompt, "Say in the prompt what to draw.");
    const { limits } = this.info;
    const [width, height] = ["width", "height"].map((id) => whole(id, capital(id), 8, 65536, 8));
    if (width * height > limits.pixels) {
      const side = Math.floor(Math.sqrt(limits.pixels) / 8) * 8;
      throw new Wrong(fields.width, `That is larger than this server draws: it takes ${side} × ${side}, or as many pixels in another shape.`);
    }
    const steps = whole("steps", "Steps", 1, limits.steps);
    const seed = fields.seed.value.trim() === "" ? null : whole("seed", "Seed", 0, LARGEST_SEED);
    const n = whole("n", "Pictures", 1, limits.pictures);
    const guidance = fields.guidance.valueAsNumber;
    if (!(guidance >= 0 && guidance <= 100)) throw new Wrong(fields.guidance, "Guidance takes a number from 0 to 100.");
    const lora = {};
    for (const field of document.querySelectorAll("#loras input")) {
      const weight = field.value === "" ? 0 : field.valueAsNumber;
      if (!(Math.abs(weight) <= 10)) throw new Wrong(field, `${field.name} takes a number from -10 to 10.`);
      if (weight) lora[field.name] = weight;
    }
    return {
      prompt, negative: fields.negative.value.trim(), model: this.model.name, n, steps, guidance, seed, width, height,
      scheduler: fields.scheduler.value || null, quality: chosen("quality") ?? "exact", image: this.image,
      strength: Number(fields.strength.value), lora,
    };
  }

  #fillModel(quality = chosen("quality")) {
    const { model } = this;
    fields.width.value = model.width;
    fields.height.value = model.height;
    fields.guidance.value = model.guidance;
    at("shapes").replaceChildren(...shapes(model, this.info.limits.pixels).map(([a, b, width, height]) => {
      const glyph = make("span", { class: a === b ? "glyph square" : a > b ? "glyph wide" : "glyph", "aria-hidden": "true" });
      glyph.style.setProperty("--ratio", `${a} / ${b}`);
      return choice("shape", `${width}x${height}`, () => this.#shape(width, height), glyph, `${a}:${b}`,
        make("span", { class: "sr", text: `, ${width} by ${height}` }));
    }));
    at("qualities").replaceChildren(...model.qualities.map((each) => choice("quality", each, () => this.#sayQuality(), capital(each))));
    const wanted = model.qualities.includes(quality) ? quality : model.qualities[0];
    document.querySelector(`input[name="quality"][value="${CSS.escape(wanted)}"]`).checked = true;
    this.#sayQuality();
    at("loras").replaceChildren(...model.loras.map((name) => make("label", { class: "lora" },
      make("span", { text: `LoRA ${name}` }),
      make("input", { type: "number", name, min: -10, max: 10, step: "any", inputmode: "decimal", placeholder: "0" }))));
    at("loras").hidden = !model.loras.length;
    this.#markShape();
    this.#remember();
  }

  #sayQuality() {
    const hint = this.model.qualities.length > 1 ? HINTS[chosen("quality")] : "This model has no other.";
    at("quality-hint").textContent = hint ?? "";
    this.#remember();
  }

  #shape(width, height) {
    fields.width.value = width;
    fields.height.value = height;
    this.#remember();
  }

  /** The one that the numbers say, if any. */
  #markShape() {
    const size = `${fields.width.value}x${fields.height.value}`;
    for (const each of document.querySelectorAll('input[name="shape"]')) each.checked = each.value === size;
  }

  #slideSteps() {
    if (fields.steps.value) at("steps-slide").value = fields.steps.value;
  }

  #sayStrength() {
    at("strength-said").textContent = `${Math.round(100 * fields.strength.value)} %`;
    fields.strength.setAttribute("aria-valuetext", at("strength-said").textContent);
  }

  async #pick() {
    const [file] = fields.file.files;
    if (!file) return;
    let bitmap;
    try {
      bitmap = await createImageBitmap(file);
    } catch {
      this.#dropStart();
      this.say("That file cannot be read as a picture. PNG, JPEG and WebP files can.", true);
      return;
    }
    const { width, height } = bitmap;
    // As text a file takes a third more.
    const { input_pixels = Infinity, body_bytes = Infinity } = this.info?.limits ?? {};
    const isLarge = width * height > input_pixels || file.size > body_bytes / 2;
    this.image = isLarge ? smaller(bitmap) : await dataUrl(file);
    bitmap.close();
    at("start-picture").src = this.image;
    at("start").hidden = false;
    // The server stretches it to the size that is drawn: one of its own shape suits it.
    if (this.info) {
      const own = this.model;
      this.#shape(...sized(width, height, own.width * own.height, 8));
      this.#markShape();
    }
    this.say("The size is that picture’s shape now.", false);
  }

  #dropStart() {
    this.image = null;
    fields.file.value = "";
    at("start").hidden = true;
    at("start-picture").removeAttribute("src");
    fields.file.focus();
  }

  #remember() {
    if (!this.info) return;
    const values = Object.fromEntries(REMEMBERED.map((id) => [id, fields[id].value]));
    try {
      localStorage.setItem(NAME, JSON.stringify({ ...values, quality: chosen("quality") }));
    } catch {
      // A browser that stores nothing begins anew each time.
    }
  }
}

function remembered() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {};
  }
}

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;

function choice(name, value, change, ...label) {
  return make("label", {}, make("input", { type: "radio", name, value, on: { change } }), make("span", {}, ...label));
}

function whole(id, called, least, most, step = 1) {
  const value = Number(fields[id].value);
  if (fields[id].value.trim() === "" || !Number.isInteger(value) || value < least || value > most || value % step) {
    const near = Math.min(most, Math.max(64, Math.round(value / step) * step || 0));
    const kind = step === 1 ? `a whole number from ${least} to ${most}` : `a multiple of ${step}, such as ${near}`;
    throw new Wrong(fields[id], `${called} takes ${kind}.`);
  }
  return value;
}

/** [a, b, width, height]: the model's own size first, then usual shapes with about as many pixels. */
function shapes({ width, height }, most) {
  const divisor = gcd(width, height);
  const own = [width / divisor, height / divisor, width, height];
  const others = SHAPES.filter(([a, b]) => a * own[1] !== b * own[0]).map(([a, b]) => [a, b, ...sized(a, b, width * height)]);
  return [own, ...others].filter(([, , w, h]) => w * h <= most);
}

const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** Sides of that shape with so many pixels; models like multiples of larger numbers as they grow. */
function sized(a, b, area, step = area >= 512 ** 2 ? 64 : area >= 256 ** 2 ? 32 : area >= 128 ** 2 ? 16 : 8) {
  const round = (side) => Math.max(step, Math.round(side / step) * step);
  return [round(Math.sqrt((area * a) / b)), round(Math.sqrt((area * b) / a))];
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function smaller(bitmap) {
  const scale = Math.min(1, LESS_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.95);
}
