"use strict";
// The data of the page, and the tree of groups: lane (shard or device) -> name scopes -> operations.
const D = JSON.parse(document.getElementById("data").textContent);
const OP = { name: 0, type: 1, device: 2, requested: 3, actual: 4, shard: 5, shapes: 6, bytes: 7, flops: 8, source: 9,
  reason: 10, ran: 11, backward: 12, home: 13, lane: 14, stage: 15 };
const MOST = 48; // a group with more members is divided into runs

function units(value, names) {
  let i = 0;
  while (value >= 1000 && i < names.length - 1) { value /= 1000; i++; }
  return (i ? value.toFixed(value < 10 ? 1 : 0) : value) + " " + names[i];
}
const formatBytes = (n) => units(n, ["B", "kB", "MB", "GB", "TB"]);
const formatFlops = (n) => units(n, ["FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs"]);
const deviceColor = (d) => (d < 0 ? "#8b949e" : D.devices[d].color);
const deviceName = (d) => (d < 0 ? "none" : D.devices[d].name);

function newGroup(label, parent, lane) {
  return { label, parent, lane, children: [], byName: new Map(), open: !parent, count: 0, flops: 0, bytes: 0, rank: 1e9,
    quiet: true };
}

function laneOf(op, lanes) {
  const key = op[OP.lane];
  if (!lanes.has(key)) {
    const { work, device, shards } = D.lanes[key];
    const count = shards.reduce((sum, shard) => sum + (D.rows[shard] || 0), 0);
    const what = work || (D.sharded ? "home" : ""), rows = count ? ", " + count + " rows" : "";
    const lane = { key, device, what, rows, shard: shards.length > 0, turns: shards.length > 1, order: key };
    lane.root = newGroup("", null, lane);
    lanes.set(key, lane);
  }
  return lanes.get(key);
}

const rowsOf = (shard) => (D.rows[shard] ? ", " + D.rows[shard] + " rows" : "");

function lanePath(op, lane) { // shards that take turns in a lane are groups of it
  const shard = op[OP.shard], path = scopePath(op);
  return lane.turns && shard >= 0 ? ["shard " + shard + rowsOf(shard), ...path] : path;
}

function scopePath(op) { // name scopes without the shard; communication stands with what it serves
  const parts = op[OP.name].split("/");
  if (op[OP.shard] >= 0 && parts.length > 1) return parts.slice(1);
  if (parts[0] === "graphsplit" && parts.length > 2) {
    const last = parts.pop();
    return [...parts.slice(2), last + " (" + parts[1] + ")"];
  }
  return parts;
}

const quiet = (op) => !op[OP.ran] || ["Const", "NoOp"].includes(D.types[op[OP.type]]);

function buildTree() {
  const lanes = new Map(), leaves = new Array(D.ops.length);
  D.ops.forEach((op, i) => {
    const lane = laneOf(op, lanes);
    const parts = lanePath(op, lane);
    let group = lane.root;
    for (let k = 0; k < parts.length - 1; k++) {
      let next = group.byName.get(parts[k]);
      if (!next) { next = newGroup(parts[k], group, lane); group.byName.set(parts[k], next); group.children.push(next); }
      group = next;
    }
    const leaf = { op: i, label: parts[parts.length - 1], parent: group, lane, rank: i };
    group.children.push(leaf);
    leaves[i] = leaf;
  });
  const list = [...lanes.values()].sort((a, b) => a.order - b.order);
  list.forEach((lane, k) => { lane.index = k; finishGroup(lane.root); });
  return { lanes: list, leaves };
}

function finishGroup(group) {
  group.byName = null;
  for (let i = 0; i < group.children.length; i++) {
    let child = group.children[i];
    if (!child.children) continue;
    finishGroup(child);
    while (child.children.length === 1) { // a chain of scopes with one member each is one name
      const only = child.children[0];
      only.label = child.label + "/" + only.label;
      only.parent = group;
      child = only;
      if (!child.children) break;
    }
    group.children[i] = child;
  }
  group.children.sort((a, b) => a.rank - b.rank);
  if (group.children.length > MOST) gatherAlike(group);
  if (group.children.length > MOST) divide(group);
  group.children.forEach((child) => add(group, child));
}

function add(group, child) {
  const op = child.children ? null : D.ops[child.op];
  group.count += op ? 1 : child.count;
  group.flops += op ? Math.max(op[OP.flops], 0) : child.flops;
  group.bytes += op ? op[OP.bytes] : child.bytes;
  group.rank = Math.min(group.rank, child.rank);
  group.quiet = group.quiet && (op ? quiet(op) : child.quiet);
}

const stem = (label) => label.replace(/_\d+( \(\w+\))?$/, "$1");

function gatherAlike(group) { // AddN, AddN_1, AddN_2, ... become one group
  const alike = new Map();
  for (const child of group.children) {
    const key = child.children ? child : stem(child.label);
    alike.set(key, [...(alike.get(key) || []), child]);
  }
  group.children = [];
  for (const [key, members] of alike) {
    if (members.length < 4) { group.children.push(...members); continue; }
    const run = newGroup(key + " \u00d7 " + members.length, group, group.lane);
    members.forEach((child) => { child.parent = run; run.children.push(child); });
    if (members.length > MOST) divide(run);
    run.children.forEach((child) => add(run, child));
    group.children.push(run);
  }
  group.children.sort((a, b) => a.rank - b.rank);
}

function divide(group) { // into runs of consecutive members; groups stay as they are, unless they are too many
  const all = group.children, groups = all.filter((child) => child.children).length;
  const size = Math.max(MOST / 2, Math.ceil(all.length / MOST));
  group.children = [];
  let run = [];
  const flush = () => {
    if (run.length < 2) group.children.push(...run); else group.children.push(runOf(run, group));
    run = [];
  };
  for (const child of all) {
    if (child.children && groups <= MOST) { flush(); group.children.push(child); continue; }
    run.push(child);
    if (run.length >= size) flush();
  }
  flush();
}

function runOf(members, group) {
  const run = newGroup(members[0].label + " \u2026 " + members[members.length - 1].label, group, group.lane);
  members.forEach((child) => { child.parent = run; run.children.push(child); add(run, child); });
  return run;
}

function shown(item) { // the item itself, or the outermost closed group that hides it
  let visible = item;
  for (let group = item.parent; group && group.parent; group = group.parent) if (!group.open) visible = group;
  return visible;
}

const pathOf = (group) => (group.parent && group.parent.parent ? pathOf(group.parent) + "/" : "") + group.label;

function openUntil(tree, most) { // open groups level by level, the same in all shards, while the view is small
  let rows = tree.lanes.reduce((sum, lane) => sum + lane.root.children.length, 0);
  let level = tree.lanes.flatMap((lane) => lane.root.children);
  while (level.length) {
    const closed = new Map();
    for (const group of level.filter((child) => child.children && !child.quiet)) {
      const path = (group.lane.shard ? "s:" : "h:") + pathOf(group);
      closed.set(path, [...(closed.get(path) || []), group]);
    }
    const work = (groups) => groups.reduce((sum, group) => sum + group.count, 0);
    level = [];
    for (const groups of [...closed.values()].sort((a, b) => work(b) - work(a))) {
      const more = groups.reduce((sum, group) => sum + group.children.length, 0);
      if (rows + more > most) return;
      rows += more;
      groups.forEach((group) => { group.open = true; level.push(...group.children); });
    }
  }
}
