// Keys: asks for the API key, keeps it for this tab, and tells who one is; admins see the tenants.

import { compact, el, number, percent, problem, table } from "./ui.js";

export function mount(root, { api, navigate, announce, route }) {
  const back = route.query.get("back");
  const who = el("section", { "aria-label": "Who you are" });
  const input = el("input", {
    id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "key-note",
  });
  const form = el(
    "form",
    { class: "line", onsubmit: save },
    el("label", { for: "key" }, "API key"),
    input,
    el("button", { type: "submit" }, "Use this key"),
    el("button", { type: "button", class: "quiet", onclick: forget }, "Forget it"),
  );
  root.append(
    el("h1", null, "Keys"),
    back && !api.key ? el("p", { class: "note" }, "This server asks for an API key.") : "",
    form,
    el("p", { id: "key-note", class: "muted" },
      "Kept in this tab's session storage until the tab is closed; it goes to this server and nowhere else."),
    who,
  );

  async function save(event) {
    event.preventDefault();
    api.key = input.value.trim();
    input.value = "";
    if ((await check()) && back) navigate(back);
  }

  function forget() {
    api.key = "";
    announce("The key is forgotten.");
    check();
  }

  async function check() {
    try {
      const cache = await api.get("v1/cache");
      who.replaceChildren(...about(cache, api.key).flat());
      announce(`You are ${cache.tenant || "everybody"}, ${cache.role}.`);
      return true;
    } catch (error) {
      const isMissing = error.status === 401 && !api.key;
      who.replaceChildren(isMissing ? el("p", { class: "muted" }, "No key is set.") : problem(error));
      return false;
    }
  }

  if (api.key || !back) check();
  if (back) input.focus();
}

function about(cache, key) {
  const name = cache.tenant ? [el("strong", null, cache.tenant), ", "] : "";
  const words = cache.role === "admin" ? "an admin: you see the figures of all tenants, and the text of your own."
    : "a user: you see what is yours.";
  const open = !key && cache.role === "admin" && !cache.tenant;
  return [
    el("h2", null, "You"),
    el("p", null, open ? "This server asks for no key: everybody who reaches it is its admin." : ["You are ", name, words]),
    cache.role === "user" ? el("p", null, `Quota: ${quotaText(cache.quota)}`) : "",
    cache.tenants ? tenants(cache.tenants) : "",
  ];
}

function quotaText(quota) {
  if (!quota) return "none; the cache is shared as it is used.";
  const floor = quota.floor_blocks === null ? "no floor" : `at least ${number(quota.floor_blocks)} blocks`;
  const ceiling = quota.ceiling_blocks === null ? "no ceiling" : `at most ${number(quota.ceiling_blocks)} blocks`;
  return `${floor}, ${ceiling}; ${number(quota.used_blocks)} are used.`;
}

function tenants(list) {
  const rows = list.map(({ tenant, windows, running_requests: running, quota }) =>
    el("tr", null,
      el("th", { scope: "row" }, tenant || "(no key)"),
      el("td", { class: "figure" }, number(running)),
      el("td", { class: "figure" }, number(windows["5m"].requests)),
      el("td", { class: "figure" }, percent(windows["5m"].token_hit_rate)),
      el("td", { class: "figure" }, compact(windows.total.prompt_tokens)),
      el("td", { class: "figure" }, percent(windows.total.token_hit_rate)),
      el("td", null, quotaText(quota))));
  const headings = ["Tenant", "#Running", "#Requests, 5 min", "#Hit rate, 5 min", "#Prompt tokens", "#Hit rate", "Quota"];
  return [
    el("h2", null, "Tenants"),
    rows.length ? table("Tenants", headings, rows).node : el("p", { class: "muted" }, "None has sent a prompt yet."),
  ];
}
