// Upstreams: of a proxy before several, how each is and what it holds, and of a request where it went and why.

import { compact, duration, el, number, percent, plural, table } from "./ui.js";

const HEALTH = { healthy: "healthy", draining: "drained: takes no requests", failed: "failed" };
const KNOWS = { exact: "exact, by its events", incomplete: "events are missing", guess: "a guess, by what it was sent" };
const REASONS = {
  prefix: "its prefix is there",
  queue_elsewhere: "more of it is elsewhere, but so is a queue that costs more",
  session: "the request before it went there",
  least_queue: "it has least to do there",
  keeps: "what it goes on from is there",
};

/** A panel that is empty until there are several. */
export function upstreamsPanel() {
  const node = el("div");
  return {
    node,
    show(upstreams) {
      const shown = table("Each upstream", ["Upstream", "Health", "#Blocks", "Known", "#Queue", "#Running", "#Requests", "#Hit rate", "#Tokens/s"], upstreams.map(row));
      node.replaceChildren(...(upstreams.length ? [el("section", { class: "panel", "aria-label": "Upstreams" }, el("h2", null, "Upstreams"), shown.node)] : []));
    },
  };
}

function row(one) {
  const figures = [duration(one.queue_s), number(one.running), number(one.requests), percent(one.token_hit_rate), compact(one.prefill_rate)];
  return el("tr", null, el("td", null, one.address), el("td", null, HEALTH[one.health]), el("td", { class: "figure" }, compact(one.blocks)),
    el("td", null, KNOWS[one.knows]), figures.map((text) => el("td", { class: "figure" }, text)));
}

/** Of a request, as facts: where it went and why. */
export function chosen(request) {
  const { choice, upstream } = request;
  if (!choice) return [["Upstream", upstream]];
  const unit = choice.is_exact ? "token" : "piece";
  const found = `${number(choice.resident)} of ${plural(choice.units, unit)}${choice.expected ? `, ${number(choice.expected)} more coming` : ""}`;
  return [
    ["Upstream", `${upstream}: ${REASONS[choice.reason]}`],
    ["There when it was chosen", choice.units ? found : "no prompt"],
    ["Queue there", duration(choice.queue_s)],
    ...(choice.failed.length ? [["Tried before", choice.failed.join(", ")]] : []),
  ];
}
