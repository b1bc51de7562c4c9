// Elements from their parts. Text is only ever set as text.

/** `make("a", {href, text, class, on: {click}}, ...children)` */
export function make(tag, { text, class: names, on = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (names) element.className = names;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** A drawing of lines on 16 by 16. */
export function icon(path) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" })) {
    svg.setAttribute(name, value);
  }
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

export const CROSS = "M3.5 3.5l9 9m0-9l-9 9";
export const ENLARGE = "M9.5 2.5h4v4m0-4L9 7M6.5 13.5h-4v-4m0 4L7 9";

export const capital = (word) => word.charAt(0).toUpperCase() + word.slice(1);

/** Three figures are enough of a time. */
export function seconds(value) {
  if (value >= 90) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
