// The radix tree, live: an icicle of the heaviest nodes, with a list of the same beside it for readers.

import { Icicle, label } from "./icicle.js";
import { TreeModel, KINDS, WIDTHS } from "./tree_model.js";
import { NodePanel, results } from "./tree_panel.js";
import { compact, duration, el, number, pause, plural, problem } from "./ui.js";

const MAX_NODES = 2000;
const MAX_FOUND = 50;
const MIN_ROWS = 6;
const MAX_ROWS = 20;
const FASTEST_MS = 250; // between snapshots while requests run
const QUIET_MS = 1000; // and while none do
const NODE_MS = 2.5; // waited for each node of a snapshot, so that a viewer takes less than 1 % of two cores,
const SLOWEST_MS = 2500; // but no longer than this
const ZOOM_MS = 220;
const LISTED = 30; // siblings and children in the list
const MARK = "icicle-frame"; // the name of the measures of performance

const MAX_MARKS = 1000; // before they are thrown away

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

export function mount(root, page) {
  const view = new TreeView(root, page);
  view.start();
  return () => view.stop();
}

class TreeView {
  #page;
  #model = new TreeModel();
  #end = new AbortController();
  #icicle;
  #panel;
  #width = "tokens";
  #salt = "";
  #window = { from: 0, to: 1, top: 0 };
  #target = null; // of a zoom that is under way: {from, to, top, start, begin}
  #selectedId = null;
  #hovered = null;
  #found = new Set();
  #outside = null; // the selected node, found by a search beyond the snapshot
  #wanted; // a node that the address names, until it was seen
  #frame = 0;
  #activeAt = 0;
  #rows = 0;
  #listKey = "";
  #frames = 0;

  constructor(root, page) {
    this.#page = page;
    this.#wanted = page.route?.query.get("node") ?? null;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.list = el("ul", { class: "tree-list visually-hidden", role: "presentation" });
    this.hover = el("div", { class: "tree-hover", hidden: true });
    this.box = el("div", { class: "icicle", role: "group", tabindex: "0", "aria-label": "Prefix tree", "aria-describedby": "tree-keys" }, this.canvas, this.list, this.hover);
    this.summary = el("p", { class: "tree-summary", role: "status" }, "Reading the tree …");
    this.resumes = el("li", { hidden: true }, el("span", { class: "resume-mark" }, "◆"), el("span", null, el("b", null, "Resume point"), ": requests can go on from a state kept here"));
    this.trouble = el("div");
    this.found = el("div");
    this.#panel = new NodePanel(page.api, page.announce, () => this.#read());
    root.append(
      el("h1", null, "Radix tree"),
      el("p", { class: "muted lead" }, "What the prefix cache holds. Each box is a run of tokens, read from the top down: prompts that begin alike share their upper boxes, and a request finds as much of its prompt as is here."),
      this.#toolbar(), this.found, this.summary, this.trouble,
      el("div", { class: "tree-columns" }, el("div", { class: "tree-main" }, this.#crumbs, this.box, this.#legend(), this.#keys()), this.#panel.root),
    );
    this.#icicle = new Icicle(this.canvas);
  }

  #crumbs = el("nav", { class: "crumbs", "aria-label": "Zoomed to" });

  #toolbar() {
    const search = el("input", { type: "search", name: "search", maxlength: "200", placeholder: "a text in your prompts", "aria-label": "Search for a text" });
    const salt = el("input", { type: "text", name: "salt", size: "10", "aria-label": "cache_salt", placeholder: "none" });
    salt.addEventListener("change", () => this.#part(salt.value));
    const widths = Object.entries(WIDTHS).map(([value, name]) =>
      el("label", null, el("input", { type: "radio", name: "width", value, checked: value === this.#width, onchange: () => this.#measureBy(value) }), ` ${name}`));
    const asList = el("input", { type: "checkbox", onchange: () => this.list.classList.toggle("visually-hidden", !asList.checked) });
    return el("div", { class: "tree-tools" },
      el("form", { class: "line", role: "search", onsubmit: (event) => (event.preventDefault(), this.#search(search.value)) },
        search, el("button", { type: "submit" }, "Search")),
      el("fieldset", null, el("legend", null, "Width"), widths),
      el("label", null, "cache_salt ", salt),
      el("label", null, asList, " show as a list"),
      el("button", { type: "button", class: "quiet", onclick: () => this.#zoom(null) }, "Whole tree"));
  }

  #legend() {
    this.samples = Object.keys(KINDS).map((kind) => [kind, el("canvas", { class: "sample", "aria-hidden": "true" })]);
    return el("ul", { class: "tree-legend", "aria-label": "Legend" },
      this.samples.map(([kind, sample]) => el("li", null, sample, el("span", null, el("b", null, KINDS[kind][0]), `: ${KINDS[kind][1]}`))),
      el("li", null, el("span", { class: "sample lit" }), el("span", null, el("b", null, "Lit"), ": a request has just gone down this path")),
      this.resumes);
  }

  #keys() {
    return el("details", { class: "help" }, el("summary", null, "Keys and mouse"), el("p", { id: "tree-keys" }, "Arrows move the selection, Enter or a second click zooms in, Escape or Backspace zooms out, Home shows the whole tree. Point at a node for its tokens, hits, age and holders; after a click the mouse wheel zooms, too."));
  }

  // ------------------------------------------------------------------ life

  start() {
    const { signal } = this.#end;
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(this.box);
    dark.addEventListener("change", () => (this.#icicle.repaint(), this.#sampleLegend(), this.#draw()), { signal });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event), { signal });
    this.canvas.addEventListener("pointerleave", () => this.#hover(null), { signal });
    this.canvas.addEventListener("click", (event) => this.#click(event), { signal });
    this.canvas.addEventListener("wheel", (event) => this.#wheel(event), { signal, passive: false });
    this.box.addEventListener("keydown", (event) => this.#key(event), { signal });
    this.list.addEventListener("click", (event) => this.#pick(event), { signal });
    this.#resize();
    this.#follow(signal);
    this.#listen(signal);
  }

  #observer;

  stop() {
    this.#end.abort();
    this.#observer.disconnect();
    cancelAnimationFrame(this.#frame);
  }

  /** Snapshots, one after the other, while somebody can see them. */
  async #follow(signal) {
    while (!signal.aborted) {
      if (document.visibilityState !== "visible") {
        await new Promise((done) => {
          document.addEventListener("visibilitychange", done, { once: true, signal });
          signal.addEventListener("abort", done, { once: true });
        });
        continue;
      }
      const began = performance.now();
      await this.#read();
      const spent = performance.now() - began;
      const isActive = began - this.#activeAt < 2 * QUIET_MS;
      const wait = Math.max(isActive ? FASTEST_MS : QUIET_MS, Math.min(SLOWEST_MS, NODE_MS * this.#model.nodes.size));
      await pause(Math.max(0, wait - spent), signal);
    }
  }

  /** Requests that come and go: while they do, snapshots are taken faster. */
  async #listen(signal) {
    const events = this.#page.api.stream("/v1/cache/requests?limit=20", { signal });
    try {
      for await (const { data } of events) {
        if (data.requests?.some((one) => one.state === "running" || Date.now() / 1000 - one.started_at < 5)) {
          this.#activeAt = performance.now();
        }
      }
    } catch (error) {
      if (!signal.aborted && error.status !== 401) this.trouble.replaceChildren(problem(error));
    }
  }

  async #read() {
    const salt = this.#salt;
    try {
      const query = new URLSearchParams({ limit: MAX_NODES, ...(salt && { cache_salt: salt }) });
      const snapshot = await this.#page.api.get(`/v1/cache/tree?${query}`, { signal: this.#end.signal });
      if (this.#end.signal.aborted || salt !== this.#salt) return;
      this.trouble.replaceChildren();
      this.#take(snapshot);
    } catch (error) {
      if (!this.#end.signal.aborted && error.status !== 0) this.trouble.replaceChildren(problem(error));
    }
  }

  #take(snapshot) {
    const model = this.#model;
    model.update(snapshot, performance.now());
    model.arrange(this.#width);
    const { nodes, tokens } = snapshot.totals;
    const shown = snapshot.nodes.length;
    this.#say(this.summary, nodes === 0
      ? "Nothing is cached yet: send a request, and it will appear here."
      : `${plural(tokens, "token")} in ${plural(nodes, "node")}${shown < nodes ? `, of which the heaviest ${number(shown)} are shown` : ""}.${snapshot.complete ? "" : " The tree is larger than what was looked at."}`);
    this.resumes.hidden = !snapshot.nodes.some((node) => node.checkpoints);
    if (this.#wanted) this.#arrive();
    if (this.#hovered) this.#hovered = model.nodes.get(this.#hovered.id) ?? null;
    if (this.#selected) this.#outside = null;
    this.#panel.show(this.#selected ?? this.#outside, this.#selected ? model : null);
    this.#fit();
    this.#showList();
    this.#draw();
  }

  #say(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  /** The node that the address names is there, or is not. */
  #arrive() {
    const node = this.#model.nodes.get(this.#wanted);
    const wanted = this.#wanted;
    this.#wanted = null;
    if (node) {
      this.#select(node);
      this.#zoom(node.children.length ? node : node.parent);
    } else {
      this.#page.announce("The node of this address is not among those shown.");
      this.found.replaceChildren(el("p", { class: "note" }, `The node ${wanted} is not among those shown: it has left the cache, or is too small.`));
    }
  }

  // ------------------------------------------------------------------ what is shown

  get #selected() {
    return this.#model.nodes.get(this.#selectedId) ?? null;
  }

  #select(node) {
    this.#selectedId = node?.id ?? null;
    this.#outside = null;
    if (node) history.replaceState(null, "", `#/tree?node=${node.id}`);
    this.#panel.cacheSalt = this.#salt;
    this.#panel.show(node, this.#model);
    if (node) this.#reveal(node);
    this.#showList();
    this.#draw();
  }

  /** Bring a node into the part that is drawn. */
  #reveal(node) {
    const { from, to, top } = this.#target ?? this.#window;
    const isSide = node.x1 <= from || node.x0 >= to;
    const isAbove = node.level < top || node.level >= top + this.#rows;
    if (isSide) this.#zoom(node.parent);
    else if (isAbove) this.#go({ from, to, top: Math.max(0, node.level - (node.level < top ? 0 : this.#rows - 2)) });
  }

  /** Let a node have the whole width; null: all of them. */
  #zoom(node) {
    const inside = node && node.x1 > node.x0;
    this.#go(inside ? { from: node.x0, to: node.x1, top: Math.max(0, node.level - 1) } : { from: 0, to: 1, top: 0 });
    this.#zoomedTo = inside ? node.id : null;
    this.#showCrumbs();
  }

  #zoomedTo = null;

  #go(target) {
    const begin = performance.now();
    if (calm.matches) this.#window = target;
    else this.#target = { ...target, start: { ...this.#window }, begin };
    this.#draw();
  }

  #showCrumbs() {
    const node = this.#model.nodes.get(this.#zoomedTo);
    const path = node ? this.#model.path(node) : [];
    const crumb = (text, to) => el("button", { type: "button", class: "quiet crumb", onclick: () => this.#zoom(to) }, text);
    this.#crumbs.hidden = !path.length;
    this.#crumbs.replaceChildren(...(path.length ? [crumb("Whole tree", null), ...path.slice(-5).map((one) => ["› ", crumb(label(one).slice(0, 24), one)])] : []).flat());
  }

  #measureBy(width) {
    this.#width = width;
    this.#model.arrange(width);
    this.#window = { from: 0, to: 1, top: 0 };
    this.#zoom(this.#model.nodes.get(this.#zoomedTo) ?? null);
    this.#page.announce(`Width: ${WIDTHS[width]}.`);
  }

  async #part(salt) {
    this.#salt = salt.trim();
    this.#model = new TreeModel();
    this.#select(null);
    this.#zoom(null);
    await this.#read();
  }

  async #search(text) {
    this.#found = new Set();
    if (!text.trim()) {
      this.found.replaceChildren();
      this.#draw();
      return;
    }
    const query = new URLSearchParams({ search: text, limit: MAX_FOUND, ...(this.#salt && { cache_salt: this.#salt }) });
    try {
      const answer = await this.#page.api.get(`/v1/cache/tree?${query}`);
      this.#found = new Set(answer.nodes.map((node) => node.id));
      this.found.replaceChildren(results(answer, (data) => this.#choose(data)));
    } catch (error) {
      this.found.replaceChildren(problem(error));
    }
    this.#draw();
  }

  #choose(data) {
    const node = this.#model.nodes.get(data.id);
    if (node) {
      this.#select(node);
      this.#zoom(node.children.length ? node : node.parent);
      this.box.focus();
      return;
    }
    this.#select(null);
    this.#outside = { id: data.id, data, idle: data.idle_s };
    this.#panel.show(this.#outside, null);
  }

  /** The list: the way to the selection, what is beside it, and what is below. Readers and `show as a list` use it. */
  #showList() {
    const model = this.#model;
    const selected = this.#selected;
    const nodes = selected
      ? [...model.path(selected).slice(0, -1), ...around(model.siblings(selected), selected).flatMap((one) => (one === selected ? [one, ...one.children.slice(0, LISTED)] : [one]))]
      : model.roots.slice(0, LISTED);
    const key = nodes.map((node) => `${node.id}${model.kind(node)}`).join() + this.#selectedId;
    if (key === this.#listKey) return;
    this.#listKey = key;
    this.box.setAttribute("role", nodes.length ? "tree" : "group"); // an empty tree is none to readers
    this.list.replaceChildren(...nodes.map((node) => this.#item(node, selected)));
    const active = selected ?? nodes[0];
    if (active) this.box.setAttribute("aria-activedescendant", `node-${active.id}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  #item(node, selected) {
    const model = this.#model;
    const siblings = model.siblings(node);
    const isOpen = selected !== null && model.path(selected).includes(node);
    return el("li", {
      role: "treeitem", id: `node-${node.id}`, dataset: { node: node.id }, "aria-level": node.level + 1,
      "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(node) + 1, "aria-selected": String(node === selected),
      "aria-expanded": node.children.length ? String(isOpen) : null, style: { "--level": node.level },
    }, el("span", { class: "item-text" }, label(node)), " ", el("span", { class: "muted" }, `${plural(node.data.tokens, "token")}, ${KINDS[model.kind(node)][0].toLowerCase()}${node.data.checkpoints ? `, ${plural(node.data.checkpoints.length, "resume point")}` : ""}`));
  }

  // ------------------------------------------------------------------ mouse and keys

  #point(event) {
    this.#hover(this.#icicle.at(this.#model, this.#window, event.offsetX, event.offsetY));
    const { hover } = this;
    if (hover.hidden) return;
    const isLow = event.offsetY > this.#icicle.height / 2;
    hover.style.left = `${Math.max(0, Math.min(event.offsetX + 14, this.#icicle.width - hover.offsetWidth))}px`;
    hover.style.top = `${isLow ? event.offsetY - hover.offsetHeight - 10 : event.offsetY + 16}px`;
  }

  #hover(node) {
    if (node === this.#hovered) return;
    this.#hovered = node;
    this.hover.hidden = node === null;
    if (node) this.#showHover(node);
    this.canvas.classList.toggle("over", node !== null);
    this.#draw();
  }

  #showHover(node) {
    const { data } = node;
    const below = data.subtree_tokens > data.tokens ? `, ${compact(data.subtree_tokens)} with all below` : "";
    this.hover.replaceChildren(
      el("b", null, label(node).slice(0, 120)),
      el("p", null, `${plural(data.tokens, "token")}${below}`),
      el("p", null, data.hits === null ? "shared with others" : `${plural(data.hits, "hit")}, used ${duration(node.idle)} ago, ${plural(node.leases, "holder")}`),
      el("p", null, KINDS[this.#model.kind(node)].join(": ")),
      data.checkpoints ? el("p", null, `requests can go on after token ${data.checkpoints.map((one) => one.tokens).join(", ")}`) : null);
  }

  #click(event) {
    this.box.focus({ preventScroll: true });
    const node = this.#icicle.at(this.#model, this.#window, event.offsetX, event.offsetY);
    if (!node) return;
    if (node.id === this.#selectedId) this.#zoom(node);
    else this.#select(node);
  }

  #pick(event) {
    const node = this.#model.nodes.get(event.target.closest("[data-node]")?.dataset.node);
    if (node) this.#select(node);
  }

  #wheel(event) {
    if (document.activeElement !== this.box && !event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    const { from, to, top } = this.#window;
    const place = from + (event.offsetX / this.#icicle.width) * (to - from);
    const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004);
    const width = Math.min(1, Math.max(1e-6, (to - from) * factor));
    const start = Math.max(0, Math.min(1 - width, place - ((place - from) / (to - from)) * width));
    this.#target = null;
    this.#window = { from: start, to: start + width, top: width === 1 ? 0 : top };
    this.#draw();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const model = this.#model;
    const selected = this.#selected;
    const { key } = event;
    if (key.startsWith("Arrow")) {
      const next = selected ? model.neighbour(selected, key) : model.roots[0];
      if (next) this.#select(next);
    } else if (key === "Enter" || key === " ") {
      if (selected) this.#zoom(selected);
    } else if (key === "Escape" || key === "Backspace") {
      this.#zoom(model.nodes.get(this.#zoomedTo)?.parent ?? null);
    } else if (key === "Home") {
      this.#zoom(null);
    } else return;
    event.preventDefault();
  }

  // ------------------------------------------------------------------ drawing

  #resize() {
    this.#rows = 0;
    this.#fit();
    this.#sampleLegend();
    this.#draw();
  }

  /** As many rows as the tree has, within bounds. */
  #fit() {
    const rows = Math.min(MAX_ROWS, Math.max(MIN_ROWS, this.#rows, this.#model.levels));
    if (rows === this.#rows) return;
    this.#rows = rows;
    this.#icicle.resize(this.box.clientWidth, rows);
  }

  #sampleLegend() {
    for (const [kind, sample] of this.samples) this.#icicle.sample(sample, kind);
  }

  #draw() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    this.#frame = 0;
    const began = performance.now();
    const isMoving = this.#move(began);
    const marks = { selected: this.#selected, hovered: this.#hovered, found: this.#found };
    const isFading = this.#icicle.draw(this.#model, this.#window, marks, began);
    if (++this.#frames % MAX_MARKS === 0) performance.clearMeasures(MARK);
    performance.measure(MARK, { start: began, end: performance.now() });
    if (isMoving || (isFading && !calm.matches)) this.#draw();
  }

  /** A zoom's next step; true: there is more. */
  #move(now) {
    const target = this.#target;
    if (!target) return false;
    const part = Math.min(1, (now - target.begin) / ZOOM_MS);
    const eased = 1 - (1 - part) ** 3;
    const between = (name) => target.start[name] + (target[name] - target.start[name]) * eased;
    this.#window = { from: between("from"), to: between("to"), top: target.top };
    if (part === 1) this.#target = null;
    return part < 1;
  }
}

/** Of many siblings those around one. */
function around(siblings, node) {
  const at = Math.max(0, siblings.indexOf(node) - LISTED / 2);
  return siblings.slice(at, at + LISTED);
}
