import { el } from "./ui.js";

export function mount(root) {
  root.append(el("h1", null, "Overview"));
}
