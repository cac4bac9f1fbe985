// What the overview remembers while the page is open: a reading every few seconds of the cache's figures and of
// the server's latencies, and what happened between two of them.

import { buckets, parseMetrics, percentile, since, total } from "./histograms.js";

const TTFT = "radixkv_time_to_first_token_seconds_bucket";
const ITL = "radixkv_inter_token_latency_seconds_bucket";
const WAITING = "radixkv_requests_waiting";
const RUNNING = "radixkv_requests_running";
const EVICTED = "radixkv_evicted_blocks_total";
const KEPT_S = 900;

export class History {
  readings = [];

  /** Take a reading: the answer of /v1/cache and the text of /metrics. A server that began anew begins anew here. */
  add(cache, text) {
    const metrics = parseMetrics(text, [TTFT, ITL, WAITING, RUNNING, EVICTED]);
    const value = (name) => metrics.get(name).reduce((sum, sample) => sum + sample.value, 0);
    const reading = {
      at: Date.now() / 1000,
      cache,
      ttft: buckets(metrics.get(TTFT)),
      ttftCold: buckets(metrics.get(TTFT), (labels) => labels.hit === "0"),
      ttftWarm: buckets(metrics.get(TTFT), (labels) => labels.hit === "90-100%"),
      itl: buckets(metrics.get(ITL)),
      waiting: value(WAITING),
      running: value(RUNNING),
      evicted: value(EVICTED),
    };
    const latest = this.latest;
    if (latest && reading.cache.windows.total.requests < latest.cache.windows.total.requests) this.readings = [];
    this.readings = [...this.readings.filter((old) => old.at > reading.at - KEPT_S), reading];
  }

  get latest() {
    return this.readings.at(-1);
  }

  /** The earliest reading of the latest `seconds`. */
  from(seconds, until = this.latest) {
    return this.readings.find((reading) => reading.at >= until.at - seconds) ?? until;
  }

  /** Percentiles of a latency by its name in a reading: of the latest minutes, or since the server's start. */
  latency(name, seconds = 300) {
    const lately = since(this.latest[name], this.from(seconds)[name]);
    const isRecent = total(lately) > 0;
    const counts = isRecent ? lately : this.latest[name];
    const [p50, p95, p99] = [0.5, 0.95, 0.99].map((share) => percentile(counts, share));
    return { p50, p95, p99, count: total(counts), isRecent };
  }

  /** Lines over time: each reading against that of `seconds` before, by what `measure(now, then)` makes of them. */
  lines(seconds, ...measures) {
    const pairs = this.readings.map((reading) => [reading, this.from(seconds, reading)]);
    return [this.readings.map((reading) => reading.at), ...measures.map((measure) => pairs.map(([now, then]) => measure(now, then)))];
  }
}

/** The shares of tokens found over time, as a chart takes them, up to `now`; `steps`: the server's history. */
export function hitRates(steps, now) {
  const rates = steps.map((step) => step.cached_tokens / step.prompt_tokens);
  return [[...steps.map((step) => now - step.age_s), now], [...rates, null]];
}

/** A measure for `History.lines`: a percentile of a latency. */
export const latencyAt = (name, share) => (now, then) => percentile(since(now[name], then[name]), share);
