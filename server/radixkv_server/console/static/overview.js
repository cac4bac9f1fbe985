// Overview: how much is found, how fast answers are, who waits, what the pool holds, and why tokens were missed.

import { lineChart, meter, shareBar } from "./charts.js";
import { History, hitRates, latencyAt } from "./history.js";
import { REASONS } from "./reasons.js";
import { compact, duration, el, number, pause, percent, plural, problem, reasonName, table } from "./ui.js";
import { upstreamsPanel } from "./upstreams.js";

const EVERY_MS = 2000;
const ADVICE_EVERY = 5; // readings
const MISSED_TOP = 3;
const ADAPTERS_SHOWN = 20;

/** A box: a heading, a place for figures, and, folded, what they mean and what to do. */
function card(title, meaning, action) {
  const figures = el("div", { class: "figures", "aria-busy": "true" }, el("p", { class: "muted" }, "Loading …"));
  const help = el("details", { class: "help" }, el("summary", null, "What this means"),
    el("p", null, meaning), el("p", null, el("strong", null, "What to do: "), action));
  const node = el("section", { class: "panel", "aria-label": title }, el("h2", null, title), figures, help);
  const show = (...children) => {
    figures.removeAttribute("aria-busy");
    figures.replaceChildren(...el("div", null, children).childNodes);
  };
  return { node, show };
}

const big = (text, label) => el("p", { class: "big" }, el("strong", null, text), " ", el("span", { class: "muted" }, label));
const facts = (pairs) => el("dl", { class: "facts" }, pairs.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));

function cards() {
  return {
    hits: card("Hit rate", "The share of prompt tokens that were found in the cache and not computed.",
      "below what you expect, look at the missed tokens: what varies early in a prompt costs all that follows."),
    ttft: card("Time to first token", "From a request's arrival to its first token: waiting, then computing what was not cached.",
      "high with nothing waiting means long misses; high with many waiting means too little machine."),
    itl: card("Time between tokens", "How long readers wait for each further token.",
      "if it grows with the requests running, lower --max-num-seqs or add a server."),
    load: card("Running and waiting", "Requests in the batch now, and in the queue before it.",
      "a queue that stays means more arrives than is computed: add a server, or limit tenants."),
    pool: card("Pool", "The blocks of K/V memory. Held blocks are in use by requests, pinned ones stay, cached ones may be evicted.",
      "nothing free is normal; nothing cached beside what is held means too little memory (--kv-cache-memory)."),
    evictions: card("Evictions", "Cached blocks that made room for others. A full cache evicts; what matters is whether it comes back.",
      "if prompts miss as “evicted”, pin what must stay, give quotas a floor, or give the cache more memory."),
    missed: card("Missed tokens by reason", "Prompt tokens that had to be computed since the server's start, by why the first of them was not found.",
      "work on the longest bar; “new text” alone cannot be avoided."),
    adapters: card("Adapters", "LoRA adapters on this base, and the share of their prompts' tokens that was found: each has prefixes of its own.",
      "an adapter that is read often and rarely in memory needs a larger max_loras."),
    breaks: card("What breaks most prompts", "The places where prompts that begin alike part from what is cached, those that cost most first.",
      "move what varies after what stays the same."),
  };
}

export function mount(root, { api }) {
  const stop = new AbortController();
  const history = new History();
  const all = cards();
  const rates = lineChart({ lines: [{ label: "tokens found, of each 10 s with a prompt", colour: "--cached" }], format: percent, most: 1 });
  const times = lineChart({
    lines: [
      { label: "first token, p50", colour: "--cached" },
      { label: "p95", colour: "--held" },
      { label: "between tokens, p95", colour: "--pinned" },
    ],
    format: duration,
  });
  const trouble = el("div");
  const upstreams = upstreamsPanel();
  const chart = (title, picture) => el("section", { class: "panel", "aria-label": title }, el("h2", null, title), picture.node);
  root.append(
    el("h1", null, "Overview"),
    trouble,
    upstreams.node,
    el("div", { class: "grid" }, ["hits", "ttft", "itl", "load"].map((name) => all[name].node)),
    el("div", { class: "grid wide" }, chart("Hit rate over time", rates), chart("Latency over time", times)),
    el("div", { class: "grid wide" }, ["missed", "breaks"].map((name) => all[name].node)),
    el("div", { class: "grid wide" }, ["pool", "evictions"].map((name) => all[name].node)),
    el("div", { class: "grid wide" }, all.adapters.node),
  );
  const onKey = () => (history.readings = []);
  api.addEventListener("key", onKey);
  run();

  async function run() {
    let advice = [];
    for (let turn = 0; !stop.signal.aborted; turn++) {
      try {
        const [cache, metrics] = await Promise.all([api.get("v1/cache", stop), api.text("metrics", stop)]);
        if (turn % ADVICE_EVERY === 0) {
          const { pool, data } = await api.get(`v1/cache/advice?limit=${MISSED_TOP}`, stop);
          advice = pool ? [pool, ...data] : data;
        }
        history.add(cache, metrics);
        trouble.replaceChildren();
        show(all, history, advice);
        upstreams.show(cache.upstreams ?? []);
        showCharts(rates, times, history);
      } catch (error) {
        if (!stop.signal.aborted && error.status !== 401) trouble.replaceChildren(problem(error));
      }
      await pause(EVERY_MS, stop.signal);
    }
  }

  return () => {
    stop.abort();
    api.removeEventListener("key", onKey);
    rates.destroy();
    times.destroy();
  };
}

function show(all, history, advice) {
  const { cache } = history.latest;
  const { windows } = cache;
  const isIdle = windows["5m"].requests === 0;
  const recent = isIdle ? windows.total : windows["5m"];
  all.hits.show(
    big(percent(recent.token_hit_rate), recent.requests === 0 ? "no prompt has come yet" : isIdle ? "of the tokens since the start" : "of the tokens of the last 5 minutes"),
    facts([
      ["1 min", percent(windows["1m"].token_hit_rate)],
      ["1 h", percent(windows["1h"].token_hit_rate)],
      ["Since start", percent(windows.total.token_hit_rate)],
      ["Prompts, 5 min", number(windows["5m"].requests)],
    ]),
  );
  showLatency(all.ttft, history.latency("ttft"), [
    ["Mostly cached", duration(history.latency("ttftWarm").p50)],
    ["Not cached", duration(history.latency("ttftCold").p50)],
  ]);
  showLatency(all.itl, history.latency("itl"), []);
  showPool(all.pool, cache);
  if (cache.counters) showLoadOfAll(all, history);
  else {
    all.load.show(big(number(cache.running_requests), "of yours running"));
    all.evictions.show(big(compact(cache.missed_tokens.evicted ?? 0), "tokens of yours missed, as they had been evicted"));
  }
  showMissed(all.missed, cache.missed_tokens);
  showAdapters(all.adapters, cache.adapters ?? []);
  const worth = advice.filter((one) => one.recoverable_tokens !== 0); // the pool's has none
  const nothing = advice.length ? "Prompts part from cached ones only where nothing is to be won." : "No prompt has parted from a cached one yet.";
  all.breaks.show(worth.length ? el("ul", { class: "advice" }, worth.map(breakItem)) : el("p", null, nothing));
}

/** What only admins are told: how many run and wait, and what is evicted. */
function showLoadOfAll(all, history) {
  const { cache, waiting, running, evicted } = history.latest;
  all.load.show(
    big(number(running), "running"),
    facts([["Waiting", number(waiting)], ["Yours", number(cache.running_requests)],
      ["Prompts waiting for their turn", number(cache.counters.prompts_waiting_for_turn)],
      ["Tokens reserved, not computed", number(cache.counters.reserved_tokens)],
      ["Preemptions", number(cache.counters.preemptions)]]),
  );
  all.evictions.show(
    big(compact(evicted - history.from(300).evicted), `blocks ${spanWords(history, 300)}`),
    facts([["Since start", compact(evicted)], ["Policy", cache.eviction_policy],
      ["Requests out of blocks", number(cache.counters.out_of_blocks)]]),
  );
}

/** A finding, with the text around it where it may be read. */
function breakItem({ advice, example, tenant }) {
  return el("li", null, tenant ? [el("b", null, tenant), ": "] : "", advice,
    example?.prompt ? el("p", { class: "text small" }, el("span", { class: "before" }, "…", example.before), el("mark", null, example.prompt), "…") : "");
}

/** Of how long a time a figure of the latest `seconds` speaks: the page may be younger. */
function spanWords(history, seconds) {
  const span = history.latest.at - history.from(seconds).at;
  return span < seconds - 10 ? "since the page was opened" : `in the last ${seconds / 60} minutes`;
}

function showLatency(box, { p50, p95, p99, isRecent, count }, more) {
  const when = isRecent ? "lately" : "since the start";
  box.show(big(duration(p50), count ? `at the median, ${when}` : "nothing yet"),
    facts([["p95", duration(p95)], ["p99", duration(p99)], ...more]));
}

function showPool(box, cache) {
  const { pool, block_size: size } = cache;
  const isWhole = pool.total_blocks !== undefined;
  const held = isWhole ? pool.held_blocks - pool.pinned_blocks : pool.held_blocks;
  const part = (label, value, colour) => ({ label, value, colour, text: number(value) });
  const parts = [
    part("pinned", pool.pinned_blocks, "--pinned"),
    part("held", held, "--held"),
    part("cached", pool.cached_blocks, "--cached"),
    ...(isWhole ? [part("free", pool.free_blocks, "--free")] : []),
  ];
  const blocks = isWhole ? pool.total_blocks : parts.reduce((sum, { value }) => sum + value, 0);
  box.show(
    big(compact(blocks * size), `tokens ${isWhole ? "fit" : "are yours"}: ${number(blocks)} blocks of ${size}`),
    shareBar(parts),
    cache.states ? facts([
      ["States kept", `${number(cache.states.checkpoints)} of ${number(cache.states.total_slots)}`],
      ["States evicted", number(cache.states.evicted_checkpoints)],
    ]) : null,
    cache.freed_windows ? facts(windowFacts(cache.freed_windows)) : null,
  );
}

/** The pool of layers with a sliding window, where their past is freed. */
function windowFacts({ total_blocks: total, free_blocks: free, checkpoints, evicted_checkpoints: evicted }) {
  return [
    ["Window blocks used", `${number(total - free)} of ${number(total)}`],
    ["Windows kept", number(checkpoints)],
    ["Windows evicted", number(evicted)],
  ];
}

function showMissed(box, missed) {
  const counts = Object.entries(missed).filter(([, tokens]) => tokens > 0).sort(([, one], [, other]) => other - one);
  const most = Math.max(1, ...counts.map(([, tokens]) => tokens));
  const rows = counts.map(([reason, tokens]) =>
    el("div", { class: "reason" },
      el("dt", null, reasonName(reason)),
      el("dd", null, meter(tokens / most, "--held"), el("span", { class: "count" }, plural(tokens, "token")),
        el("span", { class: "muted small" }, REASONS[reason]?.[1] ?? ""))));
  box.show(rows.length ? el("dl", { class: "reasons" }, rows) : el("p", null, "Nothing has been missed yet."));
}

/** The adapters most asked for; the box is away where there are none. */
function showAdapters(box, adapters) {
  box.node.hidden = adapters.length === 0;
  if (box.node.hidden) return;
  const rows = adapters.toSorted((one, other) => other.requests - one.requests).slice(0, ADAPTERS_SHOWN).map((one) =>
    el("tr", null,
      el("td", null, one.name),
      el("td", { class: "figure" }, number(one.rank)),
      el("td", { class: "figure" }, number(one.requests)),
      el("td", { class: "figure" }, percent(one.token_hit_rate)),
      one.reads === undefined ? null : el("td", null, one.in_memory ? "in memory" : "on disk", ` (read ${plural(one.reads, "time")})`)));
  const headings = ["Name", "#Rank", "#Prompts", "#Tokens found", ...(adapters[0].reads === undefined ? [] : ["Memory"])];
  box.show(table("Adapters", headings, rows).node);
}

function showCharts(rates, times, history) {
  const { at, cache } = history.latest;
  const found = hitRates(cache.history, at);
  rates.set(found, `Tokens found, of each 10 seconds with a prompt: ${percent(found[1].findLast((rate) => rate !== null))} lately`);
  const lines = history.lines(30, latencyAt("ttft", 0.5), latencyAt("ttft", 0.95), latencyAt("itl", 0.95));
  const [first, slow, between] = lines.slice(1).map((line) => duration(line.at(-1)));
  times.set(lines, `First token ${first} at the median, ${slow} at the 95th percentile; between tokens ${between}`);
}
