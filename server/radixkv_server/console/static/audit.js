// The report of an audit: what was found, why not the rest, where prompts break, and how it grew.

import { lineChart, meter, shareBar } from "./charts.js";
import { sideBySide } from "./diff.js";
import { compact, duration, el, number, percent, plural, table } from "./ui.js";

/** Whose it is that tokens were not read; with the words and the colour of the bar. */
const FAULTS = {
  prompt: ["the prompt changed", "--evict"],
  time: ["it had run out", "--pinned"],
  room: ["it had to make room", "--held"],
  client: ["not asked to be cached, or too early", "--accent"],
  provider: ["steady and in time, yet not read: the provider", "--hit"],
  unknown: ["unknown: no times in the log", "--muted"],
};
const GROUPS = { model: "Models", key: "Keys", conversation: "Conversations" };
const COUNTED = {
  exact: "Tokens were counted by the model's tokenizer.",
  bytes: "Each byte of a text is counted as a token.",
  estimated: "Tokens are estimated from characters, in proportion to the usage that the log tells.",
};
const MAX_ROWS = 50;

const card = (title, ...children) => el("section", { class: "panel", "aria-label": title }, el("h2", null, title), children);
const big = (share, words) => el("p", { class: "big" }, el("strong", null, percent(share)), " ", el("span", { class: "muted" }, words));
const tokens = (count) => plural(count, "token");

export function mount(root, { report }) {
  const { summary: total } = report;
  root.append(
    el("h1", null, "Cache audit"),
    el("p", { class: "muted" },
      `${plural(total.requests, "request")}, ${tokens(total.prompt_tokens)} of prompts, by the rules of ${report.rules}. `,
      COUNTED[report.tokens_are],
      report.broken.count ? ` ${plural(report.broken.count, "entry")} could not be read.`.replace("entrys", "entries") : ""),
    el("div", { class: "grid" },
      card("That was", big(total.hit_rate, total.requests_with_usage ? "of the tokens, as the answers tell" : "the answers tell no usage"), money(report, "reported")),
      card(`By the rules of ${report.rules}`, big(total.rules_hit_rate, "of the tokens"), money(report, "rules")),
      card("In the best order of the same content", big(total.best_hit_rate, "of the tokens"), money(report, "best")),
      lost(report)),
    el("div", { class: "grid wide" }, growth(report), faults(report)),
    breaks(report),
    ...Object.entries(GROUPS).map(([name, title]) => groups(report, name, title) ?? ""),
    requests(report),
  );
}

/** To the cent, and small amounts to two digits; null: no price is known. */
function price(amount, { currency }) {
  if (amount === null) return "no price is known";
  const shown = Math.abs(amount) >= 0.1 || amount === 0 ? amount.toFixed(2) : Number(amount.toPrecision(2)).toFixed(10).replace(/0+$/, "");
  return `${shown} ${currency}`;
}

function money({ money: told }, name) {
  return told ? el("p", null, `${price(told[name], told)}, by prices of ${told.date}`) : null;
}

function lost(report) {
  return card("Lost to breaks", el("p", { class: "big" }, el("strong", null, compact(report.lost_tokens)), " ", el("span", { class: "muted" }, "tokens")),
    report.lost_seconds === null ? null : el("p", null, `${duration(report.lost_seconds)} of computing at ${number(report.prefill_rate)} tokens a second`),
    report.money ? el("p", null, price(report.money.lost, report.money)) : null);
}

function growth(report) {
  const times = report.growth.map((point, at) => point.time ?? at);
  const chart = lineChart({
    lines: [
      { label: "was", colour: "--held" },
      { label: `rules of ${report.rules}`, colour: "--cached" },
      { label: "best order", colour: "--pinned" },
    ],
    format: percent,
    most: 1,
    seconds: Infinity,
  });
  const line = (name) => report.growth.map((point) => point[name]);
  chart.set([times, line("hit_rate"), line("rules_hit_rate"), line("best_hit_rate")],
    `Hit rates over time: in all ${percent(report.summary.hit_rate)} were read, ${percent(report.summary.rules_hit_rate)} by these rules.`);
  return card("Hit rate over time", chart.node);
}

function faults(report) {
  const parts = Object.entries(FAULTS)
    .map(([name, [label, colour]]) => ({ label, colour, value: report.faults[name]?.tokens ?? 0 }))
    .filter((part) => part.value > 0)
    .map((part) => ({ ...part, text: compact(part.value) }));
  return card("Why tokens were not read", parts.length ? shareBar(parts) : el("p", null, "Nothing was missed that could have been read."));
}

function breaks(report) {
  if (!report.worst.length) return card("Breaks", el("p", null, "No prompt parted from the one that it went on after."));
  return el("section", { "aria-label": "Worst breaks" }, el("h2", null, "What breaks most"), report.worst.map((found) => {
    const { example } = found;
    const cost = [tokens(found.lost_tokens), found.lost_seconds === null ? null : duration(found.lost_seconds),
      found.lost_money === null ? null : price(found.lost_money, report.money)].filter(Boolean).join(", ");
    const where = found.where && !found.what.includes(found.where) ? ` in ${found.where}` : "";
    return el("section", { class: "panel break" },
      el("h3", null, `${found.what[0].toUpperCase()}${found.what.slice(1)}${where}`),
      el("p", null, `${cost} in ${plural(found.requests, "request")}; the worst at ${example.place}`,
        example.earlier ? `, after ${example.earlier}` : "", example.age_s === null ? "." : `, ${duration(example.age_s)} later.`),
      example.old || example.new
        ? sideBySide({ before: example.before, prompt: example.new }, example.old, ["this prompt", "the earlier one"])
        : null,
      example.what_to_move ? el("p", null, el("strong", null, "What to do: "), `${example.what_to_move}.`) : null);
  }));
}

const rates = (group) => [group.hit_rate, group.rules_hit_rate, group.best_hit_rate].map((share) =>
  el("td", { class: "figure" }, share === null ? "" : meter(share), percent(share)));

function groups(report, name, title) {
  const found = report[`by_${name}`];
  if (found.length < 2) return null;
  const rows = found.slice(0, MAX_ROWS).map((group) =>
    el("tr", null, el("th", { scope: "row" }, group[name]), el("td", { class: "figure" }, number(group.requests)),
      el("td", { class: "figure" }, compact(group.prompt_tokens)), rates(group), el("td", { class: "figure" }, compact(group.lost_tokens))));
  return el("section", null, el("h2", null, title), table(title, [name, "#requests", "#tokens", "#was", "#rules", "#best", "#lost"], rows).node);
}

function requests(report) {
  const rows = report.requests.slice(-MAX_ROWS).reverse().map((one) =>
    el("tr", null, el("th", { scope: "row" }, one.place), el("td", null, one.conversation), el("td", { class: "figure" }, number(one.prompt_tokens)),
      el("td", { class: "figure" }, number(one.reported_cached_tokens)), el("td", { class: "figure" }, number(one.predicted_cached_tokens)),
      el("td", null, one.kind ?? one.reason), el("td", null, one.fault === "none" ? "" : one.fault)));
  return el("section", null, el("h2", null, "Latest requests"),
    table("Latest requests", ["where", "conversation", "#prompt", "#was", "#rules", "why", "fault"], rows).node);
}
