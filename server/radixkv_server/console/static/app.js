// The page's frame: which views there are, which one the address names, keys and the connection.

import { api } from "./api.js";
import { el, problem } from "./ui.js";
import * as explain from "./explain.js";
import * as keys from "./keys.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";
import * as requests from "./requests.js";
import * as tree from "./tree.js";

// A proxy's page has those that need no model.
const shownViews = document.body.dataset.views?.split(" ");

// A view is there as soon as its module can mount it:
// mount(root, {api, navigate, announce, route}) -> unmount().
const VIEWS = new Map(
  [
    ["overview", "Overview", overview],
    ["tree", "Tree", tree],
    ["requests", "Requests", requests],
    ["playground", "Playground", playground],
    ["explain", "Explain", explain],
    ["keys", "Keys", keys],
  ]
    .filter(([id, , module]) => module.mount && (!shownViews || shownViews.includes(id)))
    .map(([id, label, module]) => [id, { label, mount: module.mount }]),
);

const view = document.getElementById("view");
const links = new Map();
let unmount = () => {};
let shown = null;

/** Of `#/requests/abc?x=1`: id "requests", parts ["abc"], query of x; an unknown view is the first one. */
function currentRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [id, ...parts] = path.split("/").map(decodeURIComponent);
  return { id: VIEWS.has(id) ? id : "overview", parts, query: new URLSearchParams(query ?? "") };
}

/** Go to an address of the page, as `#/requests/abc`. */
function navigate(hash) {
  if (location.hash === hash) show();
  else location.hash = hash;
}

/** Say `text` to those who listen to the page. */
function announce(text) {
  document.getElementById("announcer").textContent = text;
}

function show() {
  if (location.hash === "#view") return; // the skip link
  const route = currentRoute();
  const { label, mount } = VIEWS.get(route.id);
  unmount();
  for (const [id, link] of links) {
    if (id === route.id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${label} · radixkv`;
  const root = el("div", { class: `view view-${route.id}` });
  view.replaceChildren(root);
  try {
    unmount = mount(root, { api, navigate, announce, route }) ?? (() => {});
  } catch (error) {
    unmount = () => {};
    root.append(problem(error));
    throw error;
  }
  if (shown !== null && shown !== route.id) view.focus({ preventScroll: false });
  shown = route.id;
}

function askForKey() {
  const { id } = currentRoute();
  if (id !== "keys") navigate(`#/keys?back=${encodeURIComponent(location.hash || "#/overview")}`);
}

function connection(text) {
  const node = document.getElementById("connection");
  node.textContent = text;
  node.classList.toggle("bad", text !== "");
}

for (const [id, { label }] of VIEWS) {
  links.set(id, el("a", { href: `#/${id}` }, label));
  document.getElementById("nav").append(el("li", null, links.get(id)));
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  view.focus();
});
api.addEventListener("unauthorized", askForKey);
api.addEventListener("offline", () => connection("The server cannot be reached. Trying again."));
api.addEventListener("online", () => connection(""));
window.addEventListener("hashchange", show);
show();
