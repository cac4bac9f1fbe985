// The tree as the view knows it: snapshots put in order, with what changed between them. Knows no page.

const RECENT_S = 10; // since when a node's last use was "recent"
const SLACK_S = 0.2; // idle times are rounded
const LIT_MS = 1600; // how long a path stays lit after it was used
const NEXT_SHARE = 0.05; // of those that may be evicted, who count as going next

/** What a node's colour and pattern say; each with the words of the legend. */
export const KINDS = {
  held: ["Held", "running requests use it, or something below it"],
  pinned: ["Pinned", "a pin keeps it from eviction"],
  hit: ["Recently used", `used within the last ${RECENT_S} seconds`],
  evict: ["Goes next", "among the first to be evicted when room is needed"],
  cached: ["Cached", "kept until room is needed"],
};

/** What the width of a node may stand for. */
export const WIDTHS = {
  tokens: "tokens",
  requests: "requests",
};

/**
 * One node. `x0` to `x1`: its part of the whole width, from 0 to 1. `idle`: seconds since it, or a node below, was
 * used. `requests`: those that found it, or more prompts than that which are cached through it.
 */
class TreeNode {
  constructor(serial) {
    this.serial = serial;
    this.litAt = -Infinity;
    this.children = [];
  }
}

export class TreeModel {
  nodes = new Map(); // id -> TreeNode, a node's parent before it
  roots = [];
  totals = null;
  isComplete = true;
  levels = 0;
  #serial = 0;
  #takenAt = 0;

  /** Take a snapshot, read at `now` (ms); gives the ids of the nodes where requests ended since the last one. */
  update(snapshot, now) {
    const old = this.nodes;
    const isFirst = this.totals === null;
    const passed = (now - this.#takenAt) / 1000;
    this.#takenAt = now;
    this.nodes = new Map();
    this.roots = [];
    this.levels = 0;
    this.totals = snapshot.totals;
    this.isComplete = snapshot.complete;
    for (const data of snapshot.nodes) this.#add(old.get(data.id) ?? new TreeNode(this.#serial++), data);
    const nodes = [...this.nodes.values()];
    const ends = [];
    for (const node of nodes.reverse()) {
      const idle = this.#sum(node);
      const isNew = node.idle === undefined;
      const wasUsed = isNew || node.leases > node.oldLeases || idle < node.idle + passed - SLACK_S;
      const isInner = node.children.some((child) => child.litAt === now);
      if (!isFirst && idle !== null && idle < RECENT_S && (wasUsed || isInner)) {
        if (!isInner) ends.push(node.id);
        node.litAt = now;
      }
      node.idle = idle;
      node.oldLeases = node.leases;
    }
    const candidates = nodes.filter((node) => node.evictionRank !== null).length;
    this.lastNext = Math.max(1, Math.floor(NEXT_SHARE * candidates));
    return ends;
  }

  #add(node, data) {
    Object.assign(node, {
      id: data.id,
      data,
      parent: this.nodes.get(data.parent) ?? null,
      children: [],
      level: data.level,
      tokens: data.subtree_tokens,
      hits: data.hits,
      leases: data.leases ?? 0,
      evictionRank: data.eviction_rank,
    });
    (node.parent?.children ?? this.roots).push(node);
    this.nodes.set(node.id, node);
    this.levels = Math.max(this.levels, node.level + 1);
  }

  /** Children come before their parents here. Sets `requests` and `running`; gives the idle time. */
  #sum(node) {
    let idle = node.data.idle_s;
    let requests = 0;
    node.running = node.leases;
    for (const child of node.children) {
      requests += child.requests;
      node.running += child.running;
      if (child.idle !== null) idle = idle === null ? child.idle : Math.min(idle, child.idle);
    }
    node.requests = Math.max(1, requests, node.hits ?? 0);
    return idle;
  }

  /** Give each node its part of the width. Siblings keep their order from snapshot to snapshot. O(nodes log nodes). */
  arrange(width) {
    const weight = width === "tokens" ? (node) => node.tokens : (node) => node.requests;
    const total = this.roots.reduce((sum, node) => sum + weight(node), 0) || 1;
    this.#place(this.roots, 0, 1 / total, weight);
    for (const node of this.nodes.values()) this.#place(node.children, node.x0, (node.x1 - node.x0) / weight(node), weight);
  }

  #place(nodes, start, scale, weight) {
    nodes.sort((one, other) => one.serial - other.serial);
    let x = start;
    for (const node of nodes) {
      node.x0 = x;
      x += scale * weight(node);
      node.x1 = x;
    }
  }

  /** One of KINDS. */
  kind(node) {
    const { state } = node.data;
    if (state === "pinned" || state === "held") return state;
    if (node.evictionRank !== null && node.evictionRank <= this.lastNext) return "evict";
    return node.idle !== null && node.idle < RECENT_S ? "hit" : "cached";
  }

  /** How much of its light a node has, from 0 to 1: all while a request runs below it. */
  light(node, now) {
    return node.running > 0 ? 1 : Math.max(0, 1 - (now - node.litAt) / LIT_MS);
  }

  /** From the top down to the node. */
  path(node) {
    const path = [];
    for (let at = node; at; at = at.parent) path.unshift(at);
    return path;
  }

  /** Those beside it, itself included. */
  siblings(node) {
    return node.parent?.children ?? this.roots;
  }

  /** Where an arrow key leads from a node; null: nowhere. */
  neighbour(node, key) {
    if (key === "ArrowUp") return node.parent;
    if (key === "ArrowDown") {
      return node.children.reduce((best, one) => (!best || one.x1 - one.x0 > best.x1 - best.x0 ? one : best), null);
    }
    const siblings = this.siblings(node);
    return siblings[siblings.indexOf(node) + (key === "ArrowRight" ? 1 : -1)] ?? null;
  }
}
