// Images of prompts: their thumbnails, drawn behind the words that stand for them in a text.
import { api } from "./api.js";
import { el } from "./ui.js";

/** The words for an image: its name, its size, and bits of its look. */
export const WORDS = /\[image ([0-9a-f]{8}) (\d+)x(\d+) [0-9a-f]{16}\]/g;

const known = new Map();
api.addEventListener("key", () => known.clear());

/** Draw the images whose words are in the prompts' texts within `root`; those that the server no longer knows stay words. */
export function drawImages(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) if (isShown(walker.currentNode)) found.push(walker.currentNode);
  for (const text of found) drawIn(text);
  return root;
}

const isShown = (text) => text.data.includes("[image ") && text.parentElement.closest(".text") !== null;

function drawIn(text) {
  for (const { 0: words, index, 1: name, 2: width, 3: height } of [...text.data.matchAll(WORDS)].reverse()) {
    const picture = el("img", { class: "thumbnail", hidden: true, alt: `image ${name}, ${width} x ${height} pixels`, title: words });
    text.splitText(index + words.length);
    text.after(picture);
    show(picture, name);
  }
}

async function show(picture, name) {
  if (!known.has(name)) known.set(name, api.get(`v1/cache/images/${name}`));
  try {
    picture.src = (await known.get(name)).thumbnail;
    picture.hidden = false;
  } catch {
    known.delete(name);
    picture.remove();
  }
}
