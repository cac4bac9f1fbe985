// Two short texts side by side: what both have stays plain, what only one has is marked.

import { el } from "./ui.js";

const WORDS = /\[image [0-9a-f]{8} \d+x\d+ [0-9a-f]{16}\]|\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

/** Pieces `{text, isSame}` of both texts, by their longest common run of words. O(words of one x of the other). */
export function differences(one, other) {
  const [a, b] = [one, other].map((text) => text.match(WORDS) ?? []);
  const common = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  const sides = [[], []];
  const put = (side, text, isSame) => {
    const last = sides[side].at(-1);
    if (last?.isSame === isSame) last.text += text;
    else sides[side].push({ text, isSame });
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) (put(0, a[i++], true), put(1, b[j++], true));
    else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) put(0, a[i++], false);
    else put(1, b[j++], false);
  }
  return sides;
}

/** A column of the text around a break: what stands before, then how it goes on. */
function column(title, before, pieces) {
  const onward = pieces.map(({ text, isSame }) => (isSame ? text : el("mark", null, text)));
  return el("section", { class: "panel", "aria-label": title },
    el("h3", null, title), el("p", { class: "text" }, el("span", { class: "before" }, before), onward));
}

/**
 * The text around a break, side by side.
 * @param around {before, prompt} and how the other goes on, which may be null
 */
export function sideBySide({ before, prompt }, onward, [name, otherName]) {
  if (onward === null || onward === undefined)
    return el("div", { class: "sides" }, column(name, before, [{ text: prompt, isSame: false }]));
  const [mine, theirs] = differences(prompt, onward);
  // Where less is known of the other, what comes after its end differs from nothing.
  const isCut = onward.length < prompt.length && theirs.at(-1)?.isSame && !mine.at(-1).isSame;
  if (isCut) mine.at(-1).isSame = true;
  return el("div", { class: "sides" }, column(name, before, mine), column(otherName, before, theirs));
}
