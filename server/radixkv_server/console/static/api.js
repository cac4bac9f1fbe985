// How the page talks to its server: JSON requests, and server-sent events read from a fetch stream, since
// EventSource cannot send a key. `api` is an EventTarget: 'unauthorized' (detail: the ApiError), 'key' (it
// changed), 'offline' and 'online'.

import { pause } from "./ui.js";

const BASE = new URL("../", import.meta.url);
const KEY = "radixkv.key";
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;

/** A refused request: HTTP status (0: the server was not reached), the server's words, its code. */
export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    Object.assign(this, { name: "ApiError", status, code });
  }
}

class Api extends EventTarget {
  #reached = true;

  /** The API key, kept for this tab; "" for none. */
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    this.dispatchEvent(new Event("key"));
  }

  /** The address of a path of the API, as others would write it. */
  url(path) {
    return new URL(path.replace(/^\//, ""), BASE).href;
  }

  get(path, options) {
    return this.#json("GET", path, undefined, options);
  }

  post(path, body, options) {
    return this.#json("POST", path, body, options);
  }

  del(path, body, options) {
    return this.#json("DELETE", path, body, options);
  }

  /** The text of an answer that is no JSON. */
  async text(path, options) {
    return (await this.#fetch("GET", path, undefined, options)).text();
  }

  /**
   * Events `{event, id, data}` of a stream; `data` is parsed JSON, and `[DONE]` ends the stream. A GET goes on
   * after the connection was lost, with a back-off, for as long as `signal` lets it; a POST throws.
   * Throws ApiError where the server refuses it, or a POST's answer ends with an error.
   */
  async *stream(path, { signal, method = "GET", body } = {}) {
    let lastId = "";
    let wait = FIRST_WAIT_MS;
    while (!signal?.aborted) {
      try {
        const headers = { Accept: "text/event-stream", ...(lastId && { "Last-Event-ID": lastId }) };
        const response = await this.#fetch(method, path, body, { signal, headers });
        for await (const event of parseEvents(response.body)) {
          wait = FIRST_WAIT_MS;
          lastId = event.event === "dropped" ? "" : event.id || lastId;
          if (event.data === "[DONE]") return;
          if (event.event === "dropped") break;
          const data = JSON.parse(event.data);
          // An error ends a stream that has begun: the server's own end, among others.
          if (data.error) throw new ApiError(0, data.error.message, data.error.code ?? "");
          yield { ...event, data };
        }
      } catch (error) {
        if (signal?.aborted) return;
        const isRefused = error instanceof ApiError && error.status && error.status < 500;
        if (method !== "GET" || isRefused) throw error;
      }
      if (method !== "GET") return;
      if (!signal?.aborted) this.#reach(false);
      await pause(wait, signal);
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  async #json(method, path, body, options) {
    return (await this.#fetch(method, path, body, options)).json();
  }

  async #fetch(method, path, body, { signal, headers = {} } = {}) {
    const key = this.key;
    let response;
    try {
      response = await fetch(this.url(path), {
        method,
        signal,
        cache: "no-store",
        headers: {
          ...headers,
          ...(key && { Authorization: `Bearer ${key}` }),
          ...(body !== undefined && { "Content-Type": "application/json" }),
        },
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      this.#reach(false);
      throw new ApiError(0, "The server cannot be reached.", "unreachable");
    }
    this.#reach(true);
    if (response.ok) return response;
    const refused = await refusal(response);
    if (refused.status === 401) this.dispatchEvent(new CustomEvent("unauthorized", { detail: refused }));
    throw refused;
  }

  #reach(reached) {
    if (reached === this.#reached) return;
    this.#reached = reached;
    this.dispatchEvent(new Event(reached ? "online" : "offline"));
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => ({}));
  const { message, code } = answer.error ?? {};
  return new ApiError(response.status, message ?? `The server answered ${response.status}.`, code ?? "");
}

async function* parseEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (pending + value).split(/\r?\n\r?\n/);
      pending = blocks.pop();
      yield* blocks.map(parseEvent).filter((event) => event.data);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  const event = { event: "message", id: "", data: "" };
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (name === "data") data.push(value);
    else if (name in event) event[name] = value;
  }
  return { ...event, data: data.join("\n") };
}

export const api = new Api();
