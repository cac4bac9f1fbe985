// The playground: a chat with the model that shows what each turn got from the cache, and the same as code.

import { Conversation } from "./conversation.js";
import { TurnBox, said } from "./playground_turn.js";
import { sideBySide } from "./diff.js";
import { SNIPPETS } from "./snippets.js";
import { el, number, percent, plural, problem } from "./ui.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 100, step: "any" }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["seed", "Seed", { step: 1 }],
];
const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, sure: { type: "boolean" } },
  required: ["answer", "sure"],
  additionalProperties: false,
};

const conversations = new WeakMap(); // by the page's api: looking at another view does not end a conversation

export function mount(root, page) {
  if (!conversations.has(page.api)) conversations.set(page.api, new Conversation(page.api));
  const view = new Playground(root, page, conversations.get(page.api));
  return () => view.stop();
}

const field = (label, input, ...more) => el("div", { class: "field" }, el("label", { for: input.id }, label), input, ...more);

class Playground {
  #page;
  #talk;
  #running = null; // an AbortController while an answer comes in
  #box = null; // of that answer
  #frame = 0;
  #log = el("div", { class: "talk", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: "0" });
  #draft = el("textarea", { id: "draft", rows: "3", placeholder: "Write to the model. Enter sends, Shift+Enter makes a new line." });
  #send = el("button", { type: "submit" }, "Send");
  #halt = el("button", { type: "button", class: "quiet", onclick: () => this.#running?.abort() }, "Stop");
  #results = el("div", { class: "tool-results" });
  #trouble = el("div");
  #system = el("textarea", { id: "system", rows: "4", placeholder: "You are …" });
  #model = el("select", { id: "model" });
  #numbers = NUMBERS.map(([name, label, limits]) => [name, label, el("input", { type: "number", id: name, placeholder: "default", ...limits })]);
  #tools = el("textarea", { id: "tools", rows: "5", spellcheck: "false", placeholder: "[ ]  none" });
  #schema = el("textarea", { id: "schema", rows: "5", spellcheck: "false", placeholder: "{ }  none: plain text" });
  #compare = el("button", { type: "button", class: "quiet", onclick: () => this.#showBreak() }, "See what breaks");
  #broken = el("div", { "aria-live": "polite" });
  #snippet = el("pre", { class: "text snippet", tabindex: "0", "aria-label": "The request as code" });
  #language = SNIPPETS[0][0];

  constructor(root, page, talk) {
    this.#page = page;
    this.#talk = talk;
    this.#fill();
    root.append(
      el("h1", null, "Playground"),
      el("div", { class: "play-columns" },
        el("div", { class: "play-main" }, this.#log, this.#results, this.#trouble, this.#composer()),
        el("div", { class: "play-side" }, this.#settings(), this.#code())),
    );
    root.addEventListener("input", () => this.#refresh());
    this.#showTurns();
    this.#idle();
    this.#models();
    this.#refresh();
  }

  stop() {
    this.#running?.abort();
    cancelAnimationFrame(this.#frame);
  }

  // ------------------------------------------------------------------ parts of the page

  #composer() {
    this.#draft.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    const form = el("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), this.#submit()) },
      field("Message", this.#draft),
      el("div", { class: "actions" }, this.#send, this.#halt,
        el("button", { type: "button", class: "quiet", onclick: () => this.#clear() }, "New conversation")));
    return form;
  }

  #settings() {
    const example = (text, area, value) =>
      el("button", { type: "button", class: "quiet small", onclick: () => ((area.value = JSON.stringify(value, null, 2)), this.#refresh()) }, text);
    return el("section", { class: "panel", "aria-label": "Settings" },
      field("System prompt", this.#system, el("div", { class: "actions" }, this.#compare)), this.#broken,
      el("div", { class: "numbers" }, field("Model", this.#model), this.#numbers.map(([, label, input]) => field(label, input))),
      el("details", null, el("summary", null, "Tools (JSON)"), field("A list of functions, as in chat completions", this.#tools), example("Example of tools", this.#tools, TOOLS)),
      el("details", null, el("summary", null, "JSON schema of the answer"), field("The answer will be JSON of this schema", this.#schema), example("Example of a schema", this.#schema, SCHEMA)));
  }

  #code() {
    const copy = el("button", { type: "button", class: "quiet", onclick: () => this.#copy() }, "Copy");
    const choices = SNIPPETS.map(([id, name]) =>
      el("label", null, el("input", { type: "radio", name: "language", value: id, checked: id === this.#language, onchange: () => ((this.#language = id), this.#refresh()) }), ` ${name}`));
    return el("section", { class: "panel", "aria-label": "The same request as code" },
      el("h2", null, "The same request as code"),
      el("div", { class: "actions" }, el("fieldset", null, el("legend", { class: "visually-hidden" }, "Language"), choices), copy),
      this.#snippet);
  }

  #fill() {
    const { system, options } = this.#talk;
    this.#system.value = system;
    for (const [name, , input] of this.#numbers) input.value = options[name] ?? "";
    if (options.tools) this.#tools.value = JSON.stringify(options.tools, null, 2);
    if (options.response_format) this.#schema.value = JSON.stringify(options.response_format.json_schema.schema, null, 2);
  }

  async #models() {
    try {
      const { data } = await this.#page.api.get("/v1/models");
      this.#model.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
      this.#model.value = this.#talk.options.model ?? data[0].id;
      this.#refresh();
    } catch (error) {
      if (error.status !== 401) this.#trouble.replaceChildren(problem(error));
    }
  }

  // ------------------------------------------------------------------ what is asked

  /** The settings into the conversation. Throws where one can't be read. */
  #read() {
    const options = { model: this.#model.value || undefined };
    for (const [name, label, input] of this.#numbers) {
      if (!input.validity.valid) throw new Error(`${label}: ${input.validationMessage}`);
      if (input.value !== "") options[name] = Number(input.value);
    }
    const tools = json(this.#tools.value, "Tools");
    if (tools !== undefined && !Array.isArray(tools)) throw new Error("Tools must be a JSON list.");
    if (tools?.length) options.tools = tools;
    const schema = json(this.#schema.value, "JSON schema");
    if (schema !== undefined) options.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    this.#talk.options = options;
  }

  async #submit() {
    if (this.#running) return;
    this.#trouble.replaceChildren();
    try {
      this.#read();
    } catch (error) {
      this.#trouble.replaceChildren(problem(error));
      return;
    }
    const added = this.#asked();
    if (!added) return;
    this.#talk.system = this.#system.value;
    for (const message of added) {
      this.#talk.messages.push(message);
      this.#log.append(said(message));
    }
    this.#draft.value = "";
    this.#results.replaceChildren();
    await this.#answer();
  }

  /** The messages that are to be sent now: results of tools, or the draft; null: nothing was written. */
  #asked() {
    const calls = this.#talk.openCalls;
    if (calls.length) {
      const areas = [...this.#results.querySelectorAll("textarea")];
      return calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: areas[index]?.value ?? "" }));
    }
    const text = this.#draft.value;
    if (!text.trim()) {
      this.#draft.focus();
      return null;
    }
    return [{ role: "user", content: text }];
  }

  async #answer() {
    this.#running = new AbortController();
    this.#idle();
    this.#box = null;
    const turn = await this.#talk.answer(this.#running.signal, (one) => this.#changed(one));
    this.#running = null;
    this.#idle();
    this.#box.show();
    if (turn.error) this.#page.announce(turn.error.message);
    else this.#page.announce(`Answer: ${turn.text.slice(0, 300)}. ${number(turn.cached)} of ${number(turn.usage?.prompt_tokens)} prompt tokens were cached.`);
    this.#askForResults();
    this.#refresh();
    if (!this.#talk.openCalls.length) this.#draft.focus();
  }

  #changed(turn) {
    if (!this.#box) this.#append((this.#box = new TurnBox(turn, this.#talk)));
    if (!this.#frame) {
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        this.#box?.show();
        this.#log.scrollTop = this.#log.scrollHeight;
      });
    }
  }

  #append(box) {
    this.#log.append(box.root);
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  /** The model called tools: whoever writes plays them. */
  #askForResults() {
    const calls = this.#talk.openCalls;
    this.#draft.disabled = calls.length > 0;
    this.#results.replaceChildren(...calls.map((call, index) =>
      field(`Result of ${call.function.name}`, el("textarea", { id: `result-${index}`, rows: "2" }))));
    if (calls.length) this.#results.querySelector("textarea").focus();
  }

  #idle() {
    const isRunning = this.#running !== null;
    this.#send.disabled = isRunning;
    this.#halt.disabled = !isRunning;
  }

  #clear() {
    this.#running?.abort();
    this.#talk.clear();
    this.#log.replaceChildren();
    this.#results.replaceChildren();
    this.#trouble.replaceChildren();
    this.#broken.replaceChildren();
    this.#draft.disabled = false;
    this.#showTurns();
    this.#refresh();
    this.#draft.focus();
  }

  #showTurns() {
    const { messages, turns } = this.#talk;
    const left = turns.filter((turn) => turn.text || turn.calls.length);
    for (const message of messages) {
      if (message.role === "assistant") this.#append(new TurnBox(left.shift(), this.#talk));
      else this.#log.append(said(message));
    }
    if (!messages.length) {
      this.#log.append(el("p", { class: "muted hint" }, "Say something. Under each answer stands how much of the prompt was found in the cache, and how long the first token took."));
    } else this.#log.querySelector(".hint")?.remove();
    this.#askForResults();
  }

  // ------------------------------------------------------------------ what breaks, and code

  async #showBreak() {
    this.#compare.disabled = true;
    try {
      this.#read();
      this.#broken.replaceChildren(breakage(await this.#talk.compare(this.#system.value)));
    } catch (error) {
      this.#broken.replaceChildren(problem(error));
    }
    this.#refresh();
  }

  /** What follows from what is written. */
  #refresh() {
    this.#log.querySelector(".hint")?.toggleAttribute("hidden", this.#talk.messages.length > 0);
    const isOther = this.#system.value !== this.#talk.system && this.#talk.turns.length > 0;
    this.#compare.disabled = !isOther;
    this.#compare.title = isOther ? "" : "Once the conversation has begun, edit the system prompt.";
    if (!isOther) this.#broken.replaceChildren();
    try {
      this.#read();
      const make = SNIPPETS.find(([id]) => id === this.#language)[2];
      this.#snippet.textContent = make(this.#shown(), { url: this.#page.api.url("/"), hasKey: this.#page.api.key !== "" });
    } catch (error) {
      this.#snippet.textContent = error.message;
    }
  }

  /** The body that the code sends: the next request, or, while nothing is written, the last one. */
  #shown() {
    const draft = this.#draft.value;
    const last = this.#talk.turns.at(-1)?.sent;
    if (!draft.trim() && last) return last;
    const messages = [...this.#talk.all(this.#system.value), { role: "user", content: draft.trim() ? draft : "Hello!" }];
    return JSON.parse(JSON.stringify(this.#talk.body(messages)));
  }

  async #copy() {
    const text = this.#snippet.textContent;
    try {
      await navigator.clipboard.writeText(text);
      this.#page.announce("Copied.");
    } catch {
      getSelection().selectAllChildren(this.#snippet); // without the right to write there: Ctrl+C does
      this.#page.announce("The code is selected: copy it with the keyboard.");
    }
  }
}

/** A comparison in words: what an edit costs, and where. */
function breakage({ prompt_tokens: all, shared_tokens: shared, missed_tokens: missed, around, advice }) {
  if (!around) return el("p", { class: "note" }, "The prompts are the same: nothing breaks.");
  return el("div", { class: "note breakage" },
    el("p", null, el("b", null, `${plural(missed, "token")} of ${number(all)} (${percent(missed / all)}) would be computed again.`),
      ` Up to token ${number(shared)} the prompt stays as it is cached.`),
    el("p", null, advice),
    sideBySide({ before: around.before.slice(-80), prompt: around.prompt }, around.with, ["Edited", "As sent before"]));
}

function json(text, name) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is no JSON (${error.message}).`);
  }
}
