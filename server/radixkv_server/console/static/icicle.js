// The tree on a canvas: one row a level, one box a node. Draws what it is given, and says what is where.

import { KINDS } from "./tree_model.js";

export const ROW = 30; // CSS pixels
const GAP = 1;
const MIN_PATTERN = 5; // narrower boxes are plain
const MIN_LABEL = 34;
const FONT = '12px ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace';

/** Strokes of an 8 by 8 tile, as [x0, y0, x1, y1]: what tells kinds apart without their colours. */
const STROKES = {
  held: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]],
  pinned: [[2, 2, 2, 4.5], [6, 6, 6, 8.5]],
  hit: [[0, 2, 8, 2], [0, 6, 8, 6]],
  evict: [[0, 0, 8, 8], [0, 8, 8, 0]],
  cached: [],
};

export class Icicle {
  #canvas;
  #context;
  #paints = {};
  #colours = {};
  #scale = 1;
  width = 0;
  height = 0;

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
  }

  /** Take the size of the canvas's box, for so many rows, and the page's colours. */
  resize(width, rows) {
    this.width = Math.max(1, width);
    this.height = rows * ROW;
    this.#scale = window.devicePixelRatio || 1;
    this.#canvas.width = Math.round(this.width * this.#scale);
    this.#canvas.height = Math.round(this.height * this.#scale);
    this.#canvas.style.height = `${this.height}px`;
    this.repaint();
  }

  /** Read the colours again: the page went light or dark. */
  repaint() {
    const style = getComputedStyle(this.#canvas);
    for (const name of ["fg", "panel", "bg", "accent", "line", ...Object.keys(KINDS)]) {
      this.#colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    for (const kind of Object.keys(KINDS)) this.#paints[kind] = this.#pattern(kind);
  }

  #pattern(kind) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8 * this.#scale;
    const context = tile.getContext("2d");
    context.scale(this.#scale, this.#scale);
    context.fillStyle = this.#colours.panel;
    context.fillRect(0, 0, 8, 8);
    context.globalAlpha = 0.3;
    context.fillStyle = this.#colours[kind];
    context.fillRect(0, 0, 8, 8);
    context.globalAlpha = 0.75;
    context.strokeStyle = this.#colours[kind];
    context.lineWidth = kind === "pinned" ? 2.5 : 1.3;
    for (const [x0, y0, x1, y1] of STROKES[kind]) {
      context.beginPath();
      context.moveTo(x0, y0);
      context.lineTo(x1, y1);
      context.stroke();
    }
    const pattern = this.#context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / this.#scale));
    return pattern;
  }

  /**
   * Draw the part `[from, to]` of the width, from level `top` on.
   * `marks`: {selected, hovered (nodes or null), found (set of ids)}. True: some light is still fading.
   */
  draw(model, { from, to, top }, marks, now) {
    const context = this.#context;
    context.setTransform(this.#scale, 0, 0, this.#scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = FONT;
    context.textBaseline = "middle";
    const perUnit = this.width / (to - from);
    const rows = this.height / ROW;
    let isFading = false;
    for (const node of model.nodes.values()) {
      const row = node.level - top;
      if (row < 0 || row >= rows || node.x1 <= from || node.x0 >= to) continue;
      const x = Math.max(0, (node.x0 - from) * perUnit);
      const width = Math.min(this.width, (node.x1 - from) * perUnit) - x;
      if (width < 0.4) continue;
      const light = model.light(node, now);
      isFading ||= light > 0 && light < 1;
      this.#box(node, model.kind(node), x, row * ROW, width, light, marks);
    }
    return isFading;
  }

  #box(node, kind, x, y, width, light, marks) {
    const context = this.#context;
    const inner = Math.max(0.4, width - GAP);
    context.fillStyle = width < MIN_PATTERN ? this.#colours[kind] : this.#paints[kind];
    context.fillRect(x, y, inner, ROW - GAP);
    if (width >= MIN_PATTERN) {
      context.fillStyle = this.#colours[kind];
      context.fillRect(x, y, inner, 3);
    }
    if (light > 0) {
      context.globalAlpha = light;
      this.#frame(x, y, inner, this.#colours.hit, 3);
      context.globalAlpha = 1;
    }
    if (node.data.checkpoints && width >= MIN_PATTERN) this.#diamond(x + inner - 5, y + ROW - 7);
    if (marks.found.has(node.id)) this.#frame(x, y, inner, this.#colours.accent, 2, [4, 3]);
    if (node === marks.hovered) this.#frame(x, y, inner, this.#colours.fg, 1);
    if (node === marks.selected) this.#frame(x, y, inner, this.#colours.fg, 2.5);
    if (width >= MIN_LABEL) this.#label(label(node), x, y, inner);
  }

  #frame(x, y, width, colour, line, dash = []) {
    const context = this.#context;
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.setLineDash(dash);
    context.strokeRect(x + line / 2, y + line / 2, Math.max(0.5, width - line), ROW - GAP - line);
  }

  /** The mark of a node with states, in its corner. */
  #diamond(x, y) {
    const context = this.#context;
    context.fillStyle = this.#colours.accent;
    context.beginPath();
    for (const [dx, dy] of [[0, -4], [4, 0], [0, 4], [-4, 0]]) context.lineTo(x + dx, y + dy);
    context.fill();
  }

  #label(text, x, y, width) {
    const context = this.#context;
    const most = Math.floor((width - 10) / 7.3);
    if (most < 3) return;
    const shown = text.length > most ? `${text.slice(0, most - 1)}…` : text;
    const length = Math.min(width - 6, context.measureText(shown).width + 6);
    context.fillStyle = this.#colours.panel;
    context.globalAlpha = 0.86;
    context.fillRect(x + 3, y + 7, length, ROW - 13);
    context.globalAlpha = 1;
    context.fillStyle = this.#colours.fg;
    context.fillText(shown, x + 6, y + ROW / 2 + 0.5);
  }

  /** A sample of a kind's colour and pattern, for the legend. */
  sample(canvas, kind) {
    canvas.width = 28 * this.#scale;
    canvas.height = 16 * this.#scale;
    const context = canvas.getContext("2d");
    context.scale(this.#scale, this.#scale);
    context.fillStyle = this.#paints[kind];
    context.fillRect(0, 0, 28, 16);
    context.fillStyle = this.#colours[kind];
    context.fillRect(0, 0, 28, 3);
  }

  /** The node at a place of the canvas, or null. O(nodes of the level). */
  at(model, { from, to, top }, x, y) {
    const level = top + Math.floor(y / ROW);
    const place = from + (x / this.width) * (to - from);
    for (const node of model.nodes.values()) {
      if (node.level === level && node.x0 <= place && place < node.x1) return node;
    }
    return null;
  }
}

/** A node in a few words: its text, or whose it is. */
export function label(node) {
  const { text, public: isPublic, tenant } = node.data;
  if (text) return text.replace(/\s+/g, " ").trim();
  return isPublic ? "public prefix" : tenant ? `${tenant}: ${node.data.tokens} tokens` : `${node.data.tokens} tokens`;
}
