// A conversation with the model: its messages, what is sent of them, and what each turn got from the cache.

/** One answer, as it comes in. Times are in seconds. */
class Turn {
  text = "";
  reasoning = "";
  calls = [];
  usage = null;
  ttft = null;
  finish = null;
  error = null;
  id = null;
  cold = null; // a measured time to first token without a cache
  nodes = []; // of its path in the tree

  constructor() {
    this.began = performance.now();
  }

  /** A chunk of the stream. */
  take(chunk) {
    this.id = chunk.id ?? this.id;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (this.ttft === null && (content || reasoning || calls)) this.ttft = (performance.now() - this.began) / 1000;
    this.text += content ?? "";
    this.reasoning += reasoning ?? "";
    for (const call of calls ?? []) this.#call(call);
  }

  #call({ index, id, function: { name, arguments: text } = {} }) {
    const call = (this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (id) call.id = id;
    if (name) call.function.name = name;
    call.function.arguments += text ?? "";
  }

  get cached() {
    return this.usage?.prompt_tokens_details?.cached_tokens ?? null;
  }

  get computed() {
    return this.usage === null ? null : this.usage.prompt_tokens - (this.cached ?? 0);
  }

  /** As it goes into the next request. */
  get message() {
    const calls = this.calls.filter(Boolean);
    return {
      role: "assistant",
      content: this.text || (calls.length ? null : ""),
      ...(this.reasoning && { reasoning_content: this.reasoning }),
      ...(calls.length && { tool_calls: calls }),
    };
  }
}

export class Conversation {
  system = "";
  messages = []; // but for the system prompt
  turns = []; // the answers, in order
  options = {}; // model, temperature, max_tokens, ..., tools, response_format
  #api;

  constructor(api) {
    this.#api = api;
  }

  /** All messages, perhaps with another system prompt. */
  all(system = this.system) {
    return [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
  }

  /** The body of the next request. */
  body(messages = this.all()) {
    return { ...this.options, messages, stream: true, stream_options: { include_usage: true } };
  }

  /** Ask for the next answer; `changed(turn)` is called whenever more of it is there. */
  async answer(signal, changed) {
    const body = this.body();
    const turn = new Turn();
    this.turns.push(turn);
    changed(turn);
    try {
      for await (const { data } of this.#api.stream("/v1/chat/completions", { method: "POST", body, signal })) {
        if (data.error) throw new Error(data.error.message);
        turn.take(data);
        changed(turn);
      }
    } catch (error) {
      if (!signal.aborted) turn.error = error;
    }
    if (signal.aborted) turn.finish = "stopped";
    const isSaid = turn.text || turn.calls.length;
    turn.sent = body;
    if (isSaid) this.messages.push(turn.message);
    changed(turn);
    if (isSaid) await this.#find(turn).catch(() => {});
    changed(turn);
    return turn;
  }

  /** Where in the tree this turn's prompt is. */
  async #find(turn) {
    const { messages, tools } = turn.sent;
    const asked = { messages: [...messages, turn.message], ...(tools && { tools }), add_generation_prompt: false };
    turn.nodes = (await this.#api.post("/v1/cache/explain", asked)).nodes;
  }

  /**
   * Seconds to the first token without a cache, and how that is known: "measured", "estimated" from the turn that
   * computed most of its prompt, or "itself": this turn found nothing.
   */
  cold(turn) {
    if (turn.cold !== null) return [turn.cold, "measured"];
    if (turn.ttft === null || turn.computed === null) return [null, "unknown"];
    if (!turn.cached) return [turn.ttft, "itself"];
    const known = this.turns.filter((one) => one.ttft !== null && one.computed > 1);
    const most = known.reduce((best, one) => (!best || one.computed > best.computed ? one : best), null);
    if (!most) return [null, "unknown"];
    return [Math.max(turn.ttft, (most.ttft / most.computed) * turn.usage.prompt_tokens), "estimated"];
  }

  /** Send a turn's request again where nothing is cached: with a salt of its own, for one token. */
  async measureCold(turn) {
    const probe = new Turn();
    const body = { ...turn.sent, max_tokens: 1, cache_salt: `cold-${crypto.getRandomValues(new Uint32Array(2)).join("-")}` };
    delete body.response_format;
    for await (const { data } of this.#api.stream("/v1/chat/completions", { method: "POST", body })) {
      if (data.error) throw new Error(data.error.message);
      probe.take(data);
      // One token may be no text yet: the end of its stream is as late as its first token.
      if (data.usage) probe.ttft ??= (performance.now() - probe.began) / 1000;
    }
    turn.cold = probe.ttft;
  }

  /** Begin anew. */
  clear() {
    this.messages = [];
    this.turns = [];
  }

  /** The calls that wait for their results. */
  get openCalls() {
    const last = this.messages.at(-1);
    return last?.role === "assistant" ? (last.tool_calls ?? []) : [];
  }

  /** What another system prompt would cost this conversation: a comparison by the server. */
  compare(system) {
    const { tools } = this.options;
    const messages = (text) => (this.messages.length ? this.all(text) : [...this.all(text), { role: "user", content: "…" }]);
    return this.#api.post("/v1/cache/explain", { compare: { prompt: messages(system), with: messages(this.system) }, ...(tools && { tools }) });
  }
}
