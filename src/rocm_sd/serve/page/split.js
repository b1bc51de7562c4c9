// Two pictures over one another, and a slider that moves the line between them.

import { make } from "./dom.js";

/** In a stage: `left` and `right` are what the two are called. */
export class Split {
  constructor(stage, left, right) {
    this.stage = stage;
    this.names = { left, right };
    this.left = make("div", { class: "layer" });
    this.right = make("div", { class: "layer over" });
    this.slider = make("input", {
      type: "range", class: "split", min: 0, max: 100, step: 0.5, value: 50, on: { input: () => this.#move() },
      "aria-label": `How much of ${left.toLowerCase()} is shown, beside ${right.toLowerCase()}`,
    });
    this.line = make("div", { class: "line", "aria-hidden": "true" });
    this.tags = [
      make("span", { class: "tag at-left", text: left, "aria-hidden": "true" }),
      make("span", { class: "tag at-right", text: right, "aria-hidden": "true" }),
    ];
    stage.classList.add("is-split");
    stage.prepend(this.left, this.right, this.slider, this.line, ...this.tags);
    this.#move();
  }

  /** `image` is the picture of that side from now on. */
  put(side, image) {
    this[side].replaceChildren(image);
  }

  close() {
    this.stage.classList.remove("is-split");
    for (const part of [this.left, this.right, this.slider, this.line, ...this.tags]) part.remove();
  }

  #move() {
    const share = Number(this.slider.value);
    this.stage.style.setProperty("--split", `${share}%`);
    this.tags[0].classList.toggle("gone", share < 12);
    this.tags[1].classList.toggle("gone", share > 88);
    const text = `${Math.round(share)} % ${this.names.left.toLowerCase()}, ${Math.round(100 - share)} % ${this.names.right.toLowerCase()}`;
    this.slider.setAttribute("aria-valuetext", text);
  }
}

/** How far two pictures of one size are apart, in dB: infinite where every pixel is the same. */
export async function psnr(one, other) {
  const [a, b] = await Promise.all([one, other].map(pixels));
  let sum = 0;
  for (let i = 0; i < a.length; i += 1) sum += (a[i] - b[i]) ** 2;
  // A quarter of the values is opacity, which is the same everywhere.
  return sum === 0 ? Infinity : 10 * Math.log10((255 ** 2 * a.length * 0.75) / sum);
}

async function pixels(image) {
  await image.decode();
  const canvas = make("canvas", { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height).data;
}
