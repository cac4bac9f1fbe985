// Requests: the latest prompts as they come, and of each where it missed and what to do.

import { meter } from "./charts.js";
import { explained, inTree } from "./explain.js";
import { drawImages } from "./images.js";
import { clock, duration, el, number, percent, problem, reasonName, table } from "./ui.js";
import { chosen } from "./upstreams.js";

const KEPT = 200;

export function mount(root, { api, navigate, announce, route }) {
  const stop = new AbortController();
  const [id] = route.parts;
  if (id) showOne(root, id, api, announce);
  else showList(root, api, stop.signal);
  return () => stop.abort();
}

function showList(root, api, signal) {
  const known = new Map();
  const place = el("div");
  const note = el("p", { class: "muted", role: "status" }, "Loading …");
  root.append(el("h1", null, "Requests"), note, place);
  let list = null;
  follow();

  async function follow() {
    try {
      for await (const { event, data } of api.stream("v1/cache/requests", { signal })) {
        if (event === "snapshot") known.clear();
        // Newest first, so that those added last come out on top.
        for (const request of data.requests.toReversed()) known.set(request.id, request);
        update(event === "snapshot" ? null : data.requests);
      }
    } catch (error) {
      if (!signal.aborted && error.status !== 401) note.replaceWith(problem(error));
    }
  }

  function update(changed) {
    const shown = [...known.values()].sort((one, other) => other.started_at - one.started_at).slice(0, KEPT);
    note.textContent = shown.length ? "The latest prompts, newest first; open one to see where it missed." : "No prompt has come yet: send one, and it will be here.";
    if (!shown.length) {
      list = null;
      return place.replaceChildren();
    }
    const hasTenants = shown.some((request) => request.tenant);
    if (list?.hasTenants !== hasTenants) {
      const isExpected = shown.some((request) => request.expected_tokens !== undefined);
      const headings = ["#Time", ...(hasTenants ? ["Tenant"] : []), "Prompt", "#Tokens", ...(isExpected ? ["#Expected"] : []), "#Cached", "Reason", "#First token", "#Tokens/s", "State"];
      list = { hasTenants, ...table("Latest requests", headings, []) };
      place.replaceChildren(list.node);
    }
    redraw(list.body, shown, hasTenants, changed && new Set(changed.map((request) => request.id)));
  }
}

/** Rows are kept where nothing changed, so that the focus stays where it is. */
function redraw(body, shown, hasTenants, changed) {
  const old = new Map([...body.children].map((row) => [row.dataset.id, row]));
  const focused = document.activeElement?.closest("tr")?.dataset.id;
  const rows = shown.map((request) => (changed && !changed.has(request.id) && old.get(request.id)) || row(request, hasTenants));
  body.replaceChildren(...rows);
  if (focused) rows.find((one) => one.dataset.id === focused)?.querySelector("a").focus({ preventScroll: true });
}

const oneLine = (text) => (text ?? "").replace(/\s+/g, " ").trim();

/** A prompt's text without the marks of a chat template, such as `<|im_start|>system`. */
const plain = (text) => oneLine((text ?? "").replace(/<\|im_start\|>\w*|<\|start_header_id\|>\w*<\|end_header_id\|>|<[|｜][^<>]*[|｜]>|\[\/?(?:INST|SYSTEM_PROMPT)\]|<\/?s>|<(?:bos|start_of_turn)>(?:user\b|model\b)?/g, " "));

function row(request, hasTenants) {
  const { id, text, prompt_tokens: size, cached_tokens: cached, last_message: said, reason, state } = request;
  const share = cached === null ? null : cached / size;
  return el("tr", { dataset: { id, state } },
    el("td", { class: "figure" }, clock(request.started_at)),
    hasTenants ? el("td", null, request.tenant || "–") : null,
    el("td", { class: "prompt" },
      el("a", { href: `#/requests/${encodeURIComponent(id)}` }, oneLine(said) || plain(text) || id),
      request.adapter ? el("span", { class: "muted small" }, `adapter ${request.adapter}`) : "",
      oneLine(said) && plain(text) ? el("span", { class: "muted small" }, plain(text)) : ""),
    el("td", { class: "figure" }, number(size)),
    request.expected_tokens === undefined ? null : el("td", { class: "figure" }, number(request.expected_tokens)),
    el("td", { class: "figure cached-share" }, share === null ? "–" : el("span", null, meter(share), el("span", null, number(cached)), el("span", null, percent(share)))),
    el("td", null, reasonName(reason)),
    el("td", { class: "figure" }, duration(request.ttft_s)),
    el("td", { class: "figure" }, request.tokens_per_s === null ? "–" : number(request.tokens_per_s)),
    el("td", { class: `state ${state}` }, state, request.error_code ? ` (${request.error_code})` : ""));
}

async function showOne(root, id, api, announce) {
  root.append(el("p", null, el("a", { href: "#/requests" }, "All requests")), el("h1", null, "Request"));
  const place = el("div", null, el("p", { class: "muted", role: "status" }, "Loading …"));
  root.append(place);
  try {
    const request = await api.get(`v1/cache/requests/${encodeURIComponent(id)}`);
    place.replaceChildren(...details(request));
    drawImages(place);
    announce(request.explanation?.advice ?? "The request is shown.");
  } catch (error) {
    if (error.status !== 401) place.replaceChildren(problem(error));
  }
}

/** What the request's client had it compared with, and what differs first. */
function compared(comparison) {
  if (!comparison?.compared_with) return [];
  const { compared_with: earlier, state, changed, index, missed_tokens: missed } = comparison;
  const what = changed === null ? "nothing differs" : `${changed}${index === null ? "" : `[${index}]`} differs`;
  const found = { running: "it was still running", not_found: "nothing is known of it" }[state] ?? `${what}, ${number(missed)} tokens missed`;
  return [["Compared with", [el("a", { href: `#/requests/${encodeURIComponent(earlier)}` }, earlier), `: ${found}`]]];
}

/** What a prompt cost, where prices are given. */
function cost(told) {
  if (!told) return [];
  const money = (value) => `${value.toPrecision(3)} ${told.currency}`;
  return [["Cost of the prompt", `${money(told.prompt)}${told.best < told.prompt ? `, could be ${money(told.best)}` : ""} (prices of ${told.prices_of})`]];
}

function details(request) {
  const { explanation, prompt_tokens: size, cached_tokens: cached } = request;
  const facts = [
    ["State", request.error_code ? `${request.state} (${request.error_code})` : request.state],
    ["Started", clock(request.started_at)],
    ["Tenant", request.tenant || "none (no keys)"],
    ...(request.cache_salt ? [["cache_salt", request.cache_salt]] : []),
    ["Prompt", `${number(size)} tokens`],
    ...(request.adapter ? [["Adapter", request.adapter]] : []),
    ["Cached", cached === null ? "not admitted yet" : `${number(cached)} (${percent(cached / size)})`],
    ...(request.expected_tokens === undefined ? [] : [["Expected", number(request.expected_tokens)], ...chosen(request)]),
    ...compared(request.comparison),
    ...cost(request.cost),
    ["Answer", `${number(request.completion_tokens)} tokens`],
    ["First token", duration(request.ttft_s)],
    ["In all", duration(request.duration_s)],
    ["Tokens/s", request.tokens_per_s === null ? "–" : number(request.tokens_per_s)],
  ];
  return [
    el("p", { class: "muted" }, el("code", null, request.id)),
    request.text ? el("p", { class: "text panel" }, request.text, "…", request.last_message ? el("span", { class: "before" }, "\n\nLast message: ", request.last_message) : "") : "",
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))),
    inTree(request.nodes, "Show its path in the tree"),
    ...(explanation ? explained(explanation) : [el("p", { class: "note" }, "Why it missed is not known: it has not been admitted, or prefix caching is off.")]),
  ];
}
