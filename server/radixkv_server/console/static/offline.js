// The frame of a report that is one file: its data is in the page, and there is no server to ask.

import * as audit from "./audit.js";
import * as tree from "./tree.js";
import { el } from "./ui.js";

const { report, snapshot } = JSON.parse(document.getElementById("data").textContent);

/** What the views ask a server for, out of the page. */
const api = {
  isReadOnly: true,
  async get(path) {
    const wanted = new URLSearchParams(path.split("?")[1]).get("search")?.toLowerCase();
    if (!wanted) return snapshot;
    const nodes = snapshot.nodes.filter((node) => node.text?.toLowerCase().includes(wanted));
    return { found: nodes.length, complete: snapshot.complete, search: wanted, nodes: nodes.slice(0, 50).map((node) => {
      const at = node.text.toLowerCase().indexOf(wanted);
      return { ...node, snippet: node.text.slice(Math.max(0, at - 60), at + wanted.length + 60) };
    }) };
  },
  // eslint-disable-next-line require-yield
  async *stream() {},
};

for (const [name, view] of [["audit", audit], ["tree", tree]]) {
  const root = el("div", { class: `view view-${name}` });
  document.getElementById("view").append(root);
  view.mount(root, { api, report, navigate() {}, announce() {}, route: { query: new URLSearchParams() } });
}
