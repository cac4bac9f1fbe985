// The boxes of a conversation: what was said, and an answer with what it got from the cache.

import { duration, el, number, percent, plural, problem, reasonName } from "./ui.js";

const WHO = { user: "You", tool: "Tool", assistant: "Model" };
const COLD = {
  measured: "measured: the same request without a cache",
  estimated: "estimated from the turn that computed most of its prompt",
  itself: "nothing was cached, so this was it",
};

/** A message of the user's or a tool's. */
export function said({ role, content }) {
  return el("article", { class: `said ${role}` }, el("h2", { class: "who" }, WHO[role]), el("div", { class: "words" }, content));
}

/** An answer that may still be coming in; `show` brings it up to date. */
export class TurnBox {
  #turn;
  #talk;
  #reasoning = el("div", { class: "words" });
  #thought = el("details", { class: "thought", open: true }, el("summary", null, "Reasoning"), this.#reasoning);
  #words = el("div", { class: "words" });
  #calls = el("div", { class: "calls" });
  #facts = el("p", { class: "facts-line" });
  #trouble = el("div");

  constructor(turn, talk) {
    this.#turn = turn;
    this.#talk = talk;
    this.root = el("article", { class: "said assistant" }, el("h2", { class: "who" }, WHO.assistant), this.#thought, this.#words, this.#calls, this.#trouble, this.#facts);
    this.show();
  }

  show() {
    const turn = this.#turn;
    this.#thought.hidden = !turn.reasoning;
    write(this.#reasoning, turn.reasoning);
    write(this.#words, turn.text || (turn.finish || turn.error || turn.calls.length ? "" : "…"));
    this.#calls.replaceChildren(...turn.calls.filter(Boolean).map(call));
    if (turn.error && !this.#trouble.firstChild) this.#trouble.replaceChildren(problem(turn.error));
    this.#facts.replaceChildren(...this.#line());
  }

  #line() {
    const turn = this.#turn;
    const { usage } = turn;
    const parts = [];
    if (usage) {
      const { cache_miss: miss } = usage.prompt_tokens_details ?? {};
      const why = miss && miss.reason !== "hit" ? `, ${reasonName(miss.reason).toLowerCase()} at token ${number(miss.position)}` : "";
      parts.push(el("span", { class: "cached-tokens" }, `${number(turn.cached)} of ${plural(usage.prompt_tokens, "prompt token")} cached (${percent(turn.cached / usage.prompt_tokens)})${why}`));
    }
    if (turn.ttft !== null) parts.push(el("span", { class: "ttft" }, `first token after ${duration(turn.ttft)}`), ...this.#cold());
    if (usage) parts.push(plural(usage.completion_tokens, "token"));
    if (turn.finish && turn.finish !== "stop") parts.push(`ended by ${turn.finish}`);
    if (turn.nodes.length) parts.push(el("a", { href: `#/tree?node=${turn.nodes.at(-1)}` }, "Path in the tree"));
    return parts.flatMap((part, index) => (index ? [" · ", part] : [part]));
  }

  #cold() {
    const [seconds, how] = this.#talk.cold(this.#turn);
    const words = { measured: " (measured)", estimated: " (estimated)", itself: " (this one)", unknown: "" }[how];
    const text = el("span", { class: "cold", title: COLD[how] }, `cold ${how === "estimated" ? "≈ " : ""}${duration(seconds)}${words}`);
    if (how === "measured" || how === "itself" || !this.#turn.sent) return [text];
    const measure = el("button", { type: "button", class: "quiet small", onclick: () => this.#measure(measure), title: "Sends the request once more, under a cache_salt of its own" }, "Measure");
    return [el("span", null, text, " ", measure)];
  }

  async #measure(button) {
    button.disabled = true;
    try {
      await this.#talk.measureCold(this.#turn);
    } catch (error) {
      this.#trouble.replaceChildren(problem(error));
    }
    this.show();
  }
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function call({ function: { name, arguments: text } }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // not yet whole
  }
  return el("div", { class: "call" }, el("b", null, `Calls ${name}`), el("pre", { class: "text" }, shown));
}
