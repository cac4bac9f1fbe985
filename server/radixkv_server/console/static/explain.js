// Explain: where two prompts part, or where one parts from the cache, and what that costs.

import { sideBySide } from "./diff.js";
import { drawImages } from "./images.js";
import { el, number, percent, plural, problem, reasonName } from "./ui.js";

const EXAMPLE = "It is 2026-11-21 08:15. You are the helpful assistant of a lighthouse. Count the ships.";

export function mount(root, { api, announce }) {
  const mode = (value, label, checked) =>
    el("label", null, el("input", { type: "radio", name: "mode", value, checked, onchange: arrange }), " ", label);
  const one = el("textarea", { id: "one", spellcheck: "false", placeholder: EXAMPLE });
  const other = el("textarea", { id: "other", spellcheck: "false", placeholder: EXAMPLE.replace("08:15", "09:40") });
  const otherField = el("div", { class: "field" }, el("label", { for: "other" }, "Second prompt"), other);
  const label = el("label", { for: "one" }, "First prompt");
  const result = el("div", { class: "result" });
  const button = el("button", { type: "submit" }, "Explain");
  const form = el("form", { onsubmit: ask },
    el("fieldset", null, el("legend", null, "What to compare"), mode("pair", "two prompts", true), mode("cache", "one prompt with the cache", false)),
    el("div", { class: "sides" }, el("div", { class: "field" }, label, one), otherField),
    el("div", { class: "actions" }, button));
  root.append(
    el("h1", null, "Explain"),
    el("p", { class: "muted" },
      "Paste texts, lists of messages as JSON, or whole request bodies. They are tokenized as a request would be; the model gets nothing."),
    form, result);

  function isPair() {
    return form.elements.mode.value === "pair";
  }

  function arrange() {
    otherField.hidden = !isPair();
    label.textContent = isPair() ? "First prompt" : "Prompt";
  }

  async function ask(event) {
    event.preventDefault();
    button.disabled = true;
    try {
      const first = bodyOf(one.value, label.textContent);
      const answer = await api.post("v1/cache/explain", isPair() ? comparison(first, bodyOf(other.value, "Second prompt")) : first);
      result.replaceChildren(...(isPair() ? compared(answer) : explained(answer)));
      drawImages(result);
      announce(answer.advice ?? answer.detail);
    } catch (error) {
      if (error.status !== 401) result.replaceChildren(problem(error));
    } finally {
      button.disabled = false;
    }
  }
}

/** A request body of what was pasted: a text, a list of messages, or a body already. */
export function bodyOf(text, name) {
  const trimmed = text.trim();
  if (!trimmed) throw new Error(`${name} is empty: paste a text, or messages as JSON.`);
  if (!/^[[{]/.test(trimmed)) return { prompt: text };
  try {
    const value = JSON.parse(trimmed);
    return Array.isArray(value) ? { messages: value } : value;
  } catch (error) {
    if (/^(\[\s*\{|\{\s*")/.test(trimmed)) throw new Error(`${name} looks like JSON, but is none: ${error.message}.`);
    return { prompt: text };
  }
}

/** The body that compares two prompts; what stands beside the first one's is for both. */
function comparison({ messages, prompt, ...beside }, other) {
  return { ...beside, compare: { prompt: messages ?? prompt, with: other.messages ?? other.prompt } };
}

function compared(answer) {
  const { position, shared_tokens: shared, prompt_tokens: size, missed_tokens: missed, recoverable_tokens: recoverable } = answer;
  if (position === null) return [el("h2", null, "They are the same"), el("p", null, answer.advice)];
  return [
    el("h2", null, `They part at token ${number(position)}`),
    el("p", null, `${number(shared)} of ${plural(size, "token")} (${percent(shared / size)}) are shared; `,
      `${plural(missed, "token")} would be computed again`, recoverable ? `, though ${number(recoverable)} of them are the same in both.` : "."),
    advice(answer.advice),
    sideBySide(answer.around, answer.around.with, ["First prompt", "Second prompt"]),
  ];
}

/** What an explanation says; for requests, too. */
export function explained(answer) {
  const { prompt_tokens: size, cached_tokens: cached, reason, position, around } = answer;
  const where = position === null ? "" : `, at token ${number(position)}`;
  return [
    el("h2", null, `${reasonName(reason)}${where}`),
    el("p", null, answer.detail ?? `${number(cached)} of ${plural(size, "token")} (${percent(cached / size)}) were found in the cache.`),
    advice(answer.advice),
    underOther(answer.cached_under),
    around ? sideBySide(around, around.cached, ["This prompt", "What is cached"]) : "",
    inTree(answer.nodes, "Show what was found in the tree"),
  ];
}

/** A link to a path in the tree, by its nodes from the top down. */
export const inTree = (nodes, text) =>
  nodes?.length ? el("p", null, el("a", { href: `#/tree?node=${encodeURIComponent(nodes.at(-1))}` }, text)) : "";

/** More of it is there, computed by the base or by another adapter. */
const underOther = (found) =>
  found ? el("p", null, `${plural(found.cached_tokens, "token")} of it are cached for the model `, el("code", null, found.model), ", whose K/V this one can't use.") : "";

const advice = (text) => (text ? el("p", { class: "note" }, text) : "");
