// What views share: making elements, and writing figures.
import { REASONS } from "./reasons.js";

/**
 * An element. Props: `class`, `dataset`, `style` (an object), `on...` (listeners), anything else is an attribute
 * (true: empty; null, undefined and false: left out). Children: nodes, texts, lists of them; null is left out.
 */
export function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2).toLowerCase(), value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => node.style.setProperty(key, text));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const NONE = "–";
const isNone = (value) => value === null || value === undefined || Number.isNaN(value);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 12,345. */
export const number = (value) => (isNone(value) ? NONE : whole.format(value));

/** 12.3K: for narrow places. */
export const compact = (value) => (isNone(value) ? NONE : Math.abs(value) < 10_000 ? number(value) : short.format(value));

/** 83% of a share from 0 to 1; 99.9% is not 100%. */
export function percent(share) {
  if (isNone(share)) return NONE;
  const value = 100 * share;
  const digits = value > 99 && value < 100 ? Math.floor(10 * value) / 10 : Math.round(value);
  return `${digits}%`;
}

/** 41 ms, 1.25 s, 3 min, 2 h. */
export function duration(seconds) {
  if (isNone(seconds)) return NONE;
  if (seconds === 0) return "0";
  if (seconds < 0.0995) return `${(1000 * seconds).toPrecision(2)} ms`;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} d`;
}

/** The time of day of seconds since 1970. */
export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

/** "1 token", "12 tokens". */
export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A reason of a miss as readers know it. */
export const reasonName = (reason) => REASONS[reason]?.[0] ?? reason ?? NONE;

/** A box that says what went wrong; readers hear it. */
export const problem = (error) => el("p", { class: "problem", role: "alert" }, error.message ?? String(error));

/**
 * A table that scrolls within itself where it is too wide; `label` is its name for readers. A heading that begins
 * with `#` is of a column of figures.
 */
export function table(label, headings, rows) {
  const head = el("tr", null, headings.map((text) => el("th", { scope: "col", class: text.startsWith("#") && "figure" }, text.replace(/^#/, ""))));
  const body = el("tbody", null, rows);
  return {
    body,
    node: el(
      "div",
      { class: "scroller", tabindex: "0", role: "region", "aria-label": label },
      el("table", null, el("thead", null, head), body),
    ),
  };
}

/** Wait `ms`, or less if `signal` aborts. */
export const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
