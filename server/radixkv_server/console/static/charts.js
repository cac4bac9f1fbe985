// Pictures of figures: lines over time (uPlot), bars of shares.

import { clock, el } from "./ui.js";

const SHOWN_S = 300;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * Lines over time. `lines`: [{label, colour: "--hit"}]; `format` writes a value of the y axis; `most`: a fixed top
 * of it; `seconds`: how many are shown, the latest ones. Returns {node, set(data, summary), destroy()}: `data` is uPlot's ([seconds, values, ...]), and `summary`
 * says in words what the picture shows.
 */
export function lineChart({ lines, format, most, seconds = SHOWN_S }) {
  const picture = el("div", { class: "chart" }); // a picture once it has words
  const legend = el("p", { class: "legend" }, lines.map(key));
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const plot = new uPlot(
    {
      width: 300,
      height: 150,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { range: (_, first, last) => shownRange(first, last ?? Date.now() / 1000, seconds) }, y: { range: (_, __, top) => [0, most ?? Math.max(top || 0, 1e-3) * 1.1] } },
      series: [{}, ...lines.map((line) => ({ stroke: () => colour(line.colour), width: 2, points: { size: 4 }, spanGaps: true }))],
      axes: [
        { ...axis, space: 80, size: 28, values: (_, seconds) => seconds.map(clock) },
        { ...axis, size: 58, values: (_, values) => values.map(format) },
      ],
    },
    [[], ...lines.map(() => [])],
    picture,
  );
  const sizes = new ResizeObserver(() => picture.clientWidth && plot.setSize({ width: picture.clientWidth, height: 150 }));
  const theme = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => plot.redraw();
  sizes.observe(picture);
  theme.addEventListener("change", redraw);
  return {
    node: el("div", null, picture, legend),
    set(data, summary) {
      plot.setData(data);
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", summary);
    },
    destroy() {
      sizes.disconnect();
      theme.removeEventListener("change", redraw);
      plot.destroy();
    },
  };
}

/** From when to when a chart goes: the latest `seconds`, or all. */
const shownRange = (first, last, seconds) => [seconds === Infinity ? (first ?? last) : last - seconds, last];

const key = (part) => el("span", null, swatch(part.colour), part.label);
const swatch = (name) => el("span", { class: "swatch", style: { background: `var(${name})` } });

/** One bar of parts `{label, value, colour, text}` with a legend; `text` is the value in words. */
export function shareBar(parts) {
  const shown = parts.filter((part) => part.value > 0);
  const words = parts.map((part) => `${part.label} ${part.text}`).join(", ");
  return el("div", null,
    el("div", { class: "share", role: "img", "aria-label": words },
      shown.map((part) => el("span", { style: { "flex-grow": part.value, background: `var(${part.colour})` } }))),
    el("ul", { class: "legend" },
      parts.map((part) => el("li", null, swatch(part.colour), part.label, " ", el("strong", null, part.text)))));
}

/** A bar of a share from 0 to 1, beside a number that says the same. */
export const meter = (share, name = "--cached") =>
  el("span", { class: "meter", "aria-hidden": "true" }, el("span", { style: { width: `${100 * Math.min(1, share)}%`, background: `var(${name})` } }));
