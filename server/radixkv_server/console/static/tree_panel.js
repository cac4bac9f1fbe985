// What is known of the selected node, its pin, and the results of a search.

import { duration, el, number, plural, problem } from "./ui.js";
import { label } from "./icicle.js";
import { drawImages } from "./images.js";
import { KINDS } from "./tree_model.js";

const TTLS = [["10 minutes", 600], ["1 hour", 3600], ["1 day", 86_400], ["30 days", 2_592_000]];

const SHOWN_TOKENS = 48; // of a node in a snapshot

/** The facts of a node: [name, value] pairs. `model` may be null for one outside of the snapshot. */
function facts(node, model) {
  const { data } = node;
  return [
    ["State", KINDS[model?.kind(node) ?? data.state]?.[0] ?? "Public"],
    ["Tokens", `${number(data.tokens)}, from token ${number(data.start)} on`],
    ["With all below", plural(data.subtree_tokens, "token")],
    ["Nodes below", number(data.children)],
    ["Requests that end here now", number(data.leases)],
    ["Hits", number(data.hits)],
    ["Last used", node.idle === null || node.idle === undefined ? "unknown" : `${duration(node.idle)} ago`],
    ["Eviction", data.eviction_rank === null ? "can't go now" : `number ${number(data.eviction_rank)} in line`],
    ...(data.checkpoints ? [["Resume points kept", states(data.checkpoints)]] : []),
    ...(data.adapter ? [["Adapter", data.adapter]] : []),
    ...(data.tenant === undefined ? [] : [["Owner", owner(data)]]),
  ];
}

/** The checkpoints of a node, for people. */
function states(checkpoints) {
  return checkpoints.map(({ tokens, hits, superseded }) =>
    `after token ${number(tokens)} (${plural(hits, "hit")}${superseded ? ", a deeper one serves now" : ""})`).join(", ");
}

/** The node's text: its beginning, as the server gives it. */
function shownText({ text, tokens }) {
  if (text === null) return "The text of others is not shown, only its size.";
  return tokens > SHOWN_TOKENS ? `${text}…\n(the first ${SHOWN_TOKENS} of ${number(tokens)} tokens)` : text;
}

function owner({ tenant, cache_salt: salt, public: isPublic }) {
  if (isPublic) return "public: all tenants share it";
  return `${tenant ? `tenant ${tenant}` : "the only tenant"}${salt ? `, salt ${salt}` : ""}`;
}

/** The panel of one selection at a time. `api`, `announce`: the page's. `changed()` is called after a pin was set or ended. */
export class NodePanel {
  #api;
  #announce;
  #changed;
  #node = null;
  #shownId = null;
  #heading = el("h2", null, "No node is selected");
  #facts = el("dl", { class: "facts" });
  #text = el("pre", { class: "text node-text", tabindex: "0", "aria-label": "Text of the node" });
  #pins = el("div", { class: "pins" });

  constructor(api, announce, changed) {
    this.#api = api;
    this.#announce = announce;
    this.#changed = changed;
    this.root = el("section", { class: "panel tree-panel", "aria-label": "Selected node" },
      this.#heading, this.#facts, this.#text, this.#pins);
    this.show(null, null);
  }

  /** Show a node as it is now; the pins are asked for when another one is shown. */
  show(node, model) {
    this.#node = node;
    this.#text.hidden = node === null;
    this.#heading.textContent = node === null ? "No node is selected" : label(node).slice(0, 60);
    if (node === null) {
      this.#facts.replaceChildren();
      this.#pins.replaceChildren(el("p", { class: "muted" }, "Select a node: with the mouse, or with the arrow keys."));
      this.#shownId = null;
      return;
    }
    this.#facts.replaceChildren(...facts(node, model).map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
    const text = shownText(node.data);
    if (this.#text.textContent !== text) {
      this.#text.textContent = text;
      drawImages(this.#text);
    }
    const key = `${node.id} ${node.data.state}`;
    if (this.#shownId === key) return;
    this.#shownId = key;
    this.#showPins(node).catch((error) => this.#pins.replaceChildren(problem(error)));
  }

  async #showPins(node) {
    if (this.#api.isReadOnly) return;
    if (node.data.text === null) {
      this.#pins.replaceChildren(el("p", { class: "muted" }, "Only its owner can pin it."));
      return;
    }
    const salt = this.#salt(node);
    const query = salt ? `?cache_salt=${encodeURIComponent(salt)}` : "";
    const { data } = await this.#api.get(`/v1/cache/pins${query}`);
    if (this.#node?.id !== node.id) return;
    const own = data.filter((pin) => pin.node === node.id);
    const ttl = el("select", { "aria-label": "Pin for" }, TTLS.map(([name, value]) => el("option", { value }, name)));
    ttl.value = "3600";
    const pin = el("button", { type: "button", onclick: () => this.#act(pin, () => this.#pin(node, Number(ttl.value))) }, "Pin up to here");
    const listed = own.map((one) => {
      const end = el("button", { type: "button", class: "quiet", onclick: () => this.#act(end, () => this.#unpin(one)) }, "Unpin");
      const left = one.expires_in_s === null ? "until it is ended" : `for ${duration(one.expires_in_s)}, renewed by each use`;
      return el("li", null, `${plural(one.tokens, "token")} pinned ${left} `, end);
    });
    const above = node.data.state === "pinned" && !own.length;
    this.#pins.replaceChildren(
      listed.length ? el("ul", null, listed) : "",
      above ? el("p", { class: "muted" }, "A pin of a node below keeps it, too.") : "",
      el("div", { class: "actions" }, pin, ttl),
    );
  }

  #salt = (node) => node.data.cache_salt ?? this.cacheSalt ?? "";

  async #act(button, action) {
    const hadFocus = document.activeElement === button;
    button.disabled = true;
    try {
      this.#announce(await action());
      this.#shownId = null;
      await this.#changed();
    } catch (error) {
      button.disabled = false;
      this.#pins.querySelector(".problem")?.remove();
      this.#pins.append(problem(error));
      return;
    }
    if (this.#node) await this.#showPins(this.#node).catch(() => {});
    if (hadFocus) this.#pins.querySelector("button")?.focus();
  }

  async #pin(node, ttl) {
    const salt = this.#salt(node);
    const pin = await this.#api.post("/v1/cache/pins", { node: node.id, ttl, ...(salt && { cache_salt: salt }) });
    const all = pin.pinned_tokens === pin.prompt_tokens;
    return `${plural(pin.pinned_tokens, "token")} pinned${all ? "" : `: of ${number(pin.prompt_tokens)}, as the budget allows no more`}.`;
  }

  async #unpin(pin) {
    await this.#api.del("/v1/cache/pins", { id: pin.id, ...(pin.cache_salt && { cache_salt: pin.cache_salt }) });
    return "The pin has ended.";
  }
}

/** The results of a search as a list of buttons; `choose(node)` is told which one was taken. */
export function results({ search, found, nodes, complete }, choose) {
  const more = found > nodes.length ? `, the first ${number(nodes.length)} are shown` : "";
  const partly = complete ? "" : " Not all of the tree was looked through.";
  return el("div", { class: "results" },
    el("p", { role: "status" }, found ? `Found in ${plural(found, "node")}${more}.${partly}` : `“${search}” is in no cached text of yours.${partly}`),
    el("ul", null, nodes.map((node) =>
      el("li", null, el("button", { type: "button", class: "quiet result", onclick: () => choose(node) }, marked(node.snippet, search)), " ",
        el("span", { class: "muted" }, `from token ${number(node.start)}, ${plural(node.tokens, "token")}`)))));
}

function marked(text, sought) {
  const at = text.toLowerCase().indexOf(sought.toLowerCase());
  if (at < 0) return text;
  return [text.slice(0, at), el("mark", null, text.slice(at, at + sought.length)), text.slice(at + sought.length)];
}
