// Prometheus' text format, as far as the page needs it: values summed over labels, and percentiles of histograms.

const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** name -> [{labels, value}] of the metrics named. */
export function parseMetrics(text, names) {
  const found = new Map(names.map((name) => [name, []]));
  for (const line of text.split("\n")) {
    const [, name, labels, value] = SAMPLE.exec(line) ?? [];
    if (!found.has(name)) continue;
    found.get(name).push({ labels: Object.fromEntries([...(labels ?? "").matchAll(LABEL)].map(([, key, word]) => [key, word])), value: Number(value) });
  }
  return found;
}

/** Cumulative counts by upper bound, of those samples of `..._bucket` that `chosen` takes. */
export function buckets(samples, chosen = () => true) {
  const counts = new Map();
  for (const { labels, value } of samples.filter((sample) => chosen(sample.labels))) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return new Map([...counts].sort(([one], [other]) => one - other));
}

/** What came between two readings of the same buckets. */
export const since = (now, then) => new Map([...now].map(([bound, count]) => [bound, count - (then?.get(bound) ?? 0)]));

/** How many values there are. */
export const total = (counts) => counts.get(Infinity) ?? 0;

/** The value below which `share` of them are, between bounds by proportion; null where there are none. */
export function percentile(counts, share) {
  const wanted = share * total(counts);
  if (!wanted) return null;
  let [below, lower] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) return bound === Infinity ? lower : lower + ((bound - lower) * (wanted - below)) / (count - below);
    [below, lower] = [count, bound];
  }
  return lower;
}
