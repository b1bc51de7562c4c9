// A card of the gallery: one picture, from the queue over its steps to what can be done with it.

import { Refused } from "./api.js";
import { capital, CROSS, ENLARGE, icon, make, seconds } from "./dom.js";
import { alreadyDrawn, begin, letGo } from "./jobs.js";
import { psnr, Split } from "./split.js";

const viewer = document.getElementById("viewer");
const viewerPlace = document.getElementById("viewer-place");
let number = 0;

/** `page` has say(text, isBad), tell(text), useSeed(seed), qualities(model) and removed(card). */
export class Card {
  constructor(page, request, seed, job, index) {
    Object.assign(this, { page, request, seed, job, index });
    this.picture = null;
    this.comparison = null;
    // Those that it was compared with: they are kept as long as it is.
    this.others = new Set();
    this.#build();
  }

  // Of its job.

  begun() {
    if (!this.picture) this.progressText.textContent = "Waits for its first step";
  }

  step({ step, steps, preview }) {
    this.#progress(step, steps);
    if (preview && !this.picture) this.#show(this.image, preview, `Preview of: ${this.request.prompt}`);
  }

  progress(share) {
    if (!this.picture) this.#share(share, "Drawing");
  }

  done(picture) {
    this.picture = picture;
    picture.uses += 1;
    this.#show(this.image, picture.url, this.request.prompt);
    this.tools.prepend(this.enlargeButton);
    this.#actions();
    this.#rest();
  }

  over({ state, error, seconds: took }) {
    if (this.picture) {
      if (took !== null && took !== undefined) {
        const together = this.picture.together;
        this.facts.append(make("li", { text: together > 1 ? `${seconds(took)} for ${together} pictures` : seconds(took) }));
      }
      this.tools.append(this.removeButton);
      return;
    }
    this.stage.classList.add("is-off");
    this.note.textContent = state === "cancelled" ? "Cancelled." : `This was not drawn. ${error ?? ""}`;
    this.tools.append(this.removeButton);
    this.#rest();
  }

  // Its parts.

  #build() {
    const { request } = this;
    const name = `card-${(number += 1)}`;
    this.image = make("img", { class: "picture", alt: "", hidden: true, draggable: "false" });
    this.enlargeButton = make(
      "button", { type: "button", class: "round", "aria-label": "Enlarge", on: { click: () => this.#enlarge() } }, icon(ENLARGE),
    );
    this.removeButton = make(
      "button", { type: "button", class: "round", "aria-label": "Remove", on: { click: () => this.#remove() } }, icon(CROSS),
    );
    this.tools = make("div", { class: "tools" });
    this.stage = make("div", { class: "stage is-waiting" }, this.image, this.tools);
    this.stage.style.setProperty("--ratio", String(request.width / request.height));
    this.place = make("div", {}, this.stage);

    this.bar = make("progress", { max: request.steps, value: 0, "aria-label": `Steps of: ${request.prompt}` });
    this.progressText = make("span", { text: "Waits for its turn" });
    const all = this.job.seeds.length;
    this.cancelButton = make("button", {
      type: "button", class: "quiet", text: all > 1 ? `Cancel all ${all}` : "Cancel", on: { click: () => this.#cancel() },
    });
    this.work = make("div", { class: "work" }, this.bar, this.progressText, this.cancelButton);

    this.heading = make("h3", { id: name, class: "prompt", text: request.prompt, tabindex: "-1" });
    this.facts = make("ul", { class: "facts" },
      make("li", { text: `Seed ${this.seed}` }),
      make("li", { text: `${request.width} × ${request.height}` }),
      make("li", { text: capital(request.quality) }),
      make("li", { text: request.steps === 1 ? "1 step" : `${request.steps} steps` }),
    );
    this.note = make("p", { class: "note" });
    this.actions = make("div", { class: "actions" });
    this.element = make("li", {},
      make("article", { class: "card", "aria-labelledby": name },
        this.place, this.work, make("div", { class: "words" }, this.heading, this.facts, this.note, this.actions)),
    );
  }

  /** What there is to press once there is nothing to wait for. */
  #actions() {
    const { request, picture } = this;
    const named = (quality) => `${request.prompt.slice(0, 40).trim().replaceAll(/[^\p{L}\p{N}]+/gu, "-")}-${picture.seed}-${quality}.png`;
    const link = (text, { url, quality }) => make("a", { class: "button", text, href: url, download: named(quality) });
    const act = (text, click) => make("button", { type: "button", text, on: { click } });
    const parts = [act("Use seed", () => this.page.useSeed(picture.seed))];
    const other = this.comparison?.picture;
    if (other) {
      parts.push(act("End the comparison", () => this.#endComparison()));
    } else if (!this.comparison) {
      const qualities = this.page.qualities(request.model);
      const against = picture.quality === "exact" ? qualities.filter((each) => each !== "exact") : ["exact"];
      for (const quality of against) parts.push(act(`Compare with ${quality}`, () => this.#compare(quality)));
    }
    parts.push(link(other ? `Download ${picture.quality}` : "Download", picture));
    if (other) parts.push(link(`Download ${other.quality}`, other));
    this.#keepingFocus(() => this.actions.replaceChildren(...parts));
  }

  /** Nothing is drawn here: the row of the progress goes, and its place on the stage is free. */
  #rest() {
    this.stage.classList.remove("is-waiting");
    this.#keepingFocus(() => this.work.remove());
  }

  /** Who had the focus on something that is gone has it in the same card still. */
  #keepingFocus(change) {
    const had = this.element.contains(document.activeElement);
    change();
    if (had && !this.element.contains(document.activeElement)) this.heading.focus({ preventScroll: true });
  }

  #show(image, url, alt) {
    image.src = url;
    image.alt = alt;
    image.hidden = false;
  }

  #progress(step, steps, what = "Step") {
    this.bar.max = steps;
    this.bar.value = step;
    this.progressText.textContent = `${what} ${Math.min(step, steps)} of ${steps}`;
  }

  /** Of all pictures of a job together. */
  #share(share, what) {
    this.bar.max = 1;
    this.bar.value = share;
    this.progressText.textContent = `${what}, ${Math.round(100 * share)} %`;
  }

  async #cancel() {
    this.cancelButton.disabled = true;
    this.progressText.textContent = "Ends after this step";
    if (!this.comparison) await this.job.cancel();
    else if (this.comparison.job) await this.comparison.job.cancel();
    else this.comparison.isCancelled = true; // The server has not answered yet.
  }

  #remove() {
    this.comparison?.job?.cancel();
    this.#endComparison();
    if (this.picture) for (const each of [this.picture, ...this.others]) letGo(each);
    this.page.removed(this);
  }

  #enlarge() {
    viewerPlace.append(this.stage);
    viewer.addEventListener("close", () => {
      this.place.append(this.stage);
      this.enlargeButton.focus();
    }, { once: true });
    viewer.showModal();
    this.comparison?.split.slider.focus();
  }

  // Beside the same picture in another quality.

  async #compare(quality) {
    const mine = this.picture.quality === "exact" ? "left" : "right";
    const side = mine === "left" ? "right" : "left";
    const [left, right] = mine === "left" ? ["exact", quality] : ["exact", this.picture.quality];
    const split = new Split(this.stage, capital(left), capital(right));
    split.put(mine, this.image);
    this.image.alt = `${capital(this.picture.quality)}: ${this.request.prompt}`;
    const image = make("img", { class: "picture", alt: "", hidden: true, draggable: "false" });
    split.put(side, image);
    const comparison = { split, image, job: null, picture: null, isCancelled: false };
    this.comparison = comparison;
    this.#actions();
    split.slider.focus({ preventScroll: true });
    const known = alreadyDrawn(this.request, this.picture.seed, quality);
    if (known) {
      await this.#compared(comparison, known);
      return;
    }

    const shows = (url, said) => this.#show(image, url, `${said}: ${this.request.prompt}`);
    const listen = (job) => {
      comparison.job = job;
      if (comparison.isCancelled || this.comparison !== comparison) job.cancel();
      return {
        begun: () => {},
        progress: (share) => this.#share(share, capital(quality)),
        step: (_, { step, steps, preview }) => {
          this.#progress(step, steps, `${capital(quality)}, step`);
          if (preview) shows(preview, `Preview, ${quality}`);
        },
        picture: (_, picture) => shows(picture.url, capital(quality)),
        over: ({ state, error }) => {
          this.page.ended(job);
          if (this.comparison !== comparison) return;
          this.#rest();
          if (state === "done") this.#compared(comparison, job.pictures[0]);
          else {
            this.#endComparison();
            this.page.say(state === "cancelled" ? "" : `There is nothing to compare with. ${error ?? ""}`, state !== "cancelled");
            this.page.tell(state === "cancelled" ? "The comparison was cancelled." : "");
          }
        },
      };
    };
    this.#progress(0, this.request.steps);
    this.progressText.textContent = `${capital(quality)} waits for its turn`;
    this.cancelButton.disabled = false;
    this.cancelButton.textContent = "Cancel";
    this.place.after(this.work);
    try {
      this.page.began(await begin({ ...this.request, n: 1, seed: this.picture.seed, quality }, listen));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.#rest();
      this.#endComparison();
      this.page.say(error.message, true);
    }
  }

  async #compared(comparison, picture) {
    comparison.picture = picture;
    if (!this.others.has(picture)) picture.uses += 1;
    this.others.add(picture);
    this.#show(comparison.image, picture.url, `${capital(picture.quality)}: ${this.request.prompt}`);
    this.#actions();
    this.page.tell("The comparison is ready: the slider on the picture moves the line between the two.");
    const apart = await psnr(this.image, comparison.image);
    if (this.comparison !== comparison) return;
    const both = picture.quality === "exact" ? [picture, this.picture] : [this.picture, picture];
    const times = both.every((each) => each.seconds !== null && each.together === 1)
      ? `${capital(both[0].quality)} took ${seconds(both[0].seconds)}, ${both[1].quality} ${seconds(both[1].seconds)}. ` : "";
    this.note.textContent = times + (apart === Infinity
      ? "The two are the same in every pixel." : `The two are ${apart.toFixed(1)} dB apart (PSNR; more is nearer).`);
  }

  #endComparison() {
    if (!this.comparison) return;
    const { split } = this.comparison;
    this.comparison = null;
    const had = this.element.contains(document.activeElement) || this.stage.contains(document.activeElement);
    split.close();
    this.stage.prepend(this.image);
    this.image.alt = this.request.prompt;
    this.note.textContent = "";
    this.#actions();
    if (had) this.heading.focus({ preventScroll: true });
  }
}
