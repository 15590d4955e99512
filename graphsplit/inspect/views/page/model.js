"use strict";
// The data of the page, and the tree of groups: lane (shard or device) -> name scopes -> operations. What they are called
// and how they belong together is in the data.
const D = JSON.parse(document.getElementById("data").textContent);
const OP = { name: 0, type: 1, device: 2, requested: 3, actual: 4, shard: 5, shapes: 6, bytes: 7, flops: 8, source: 9,
  reason: 10, ran: 11, backward: 12, home: 13, lane: 14, stage: 15,
  scopes: 16, label: 17 };
const CRITICAL = new Set(D.critical);
const MOST = 48; // a group with more members is divided into runs
const LOOSE = 4, SMALL = 0.05; // so many operations of no layer, with so little of the FLOPs, are shown as one group

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
    quiet: true, homes: 0, critical: 0, folded: false };
}

function newLane(key) {
  const { work, device, shards, like, alike, together, note, notes } = D.lanes[key];
  const what = work || (D.sharded ? "runs once" : "");
  const lane = { key, device, what, note, together, notes, like, alike, shard: shards.length > 0, turns: shards.length > 1 };
  lane.root = newGroup("", null, lane);
  return lane;
}

const rowsOf = (shard) => (D.rows[shard] ? ", " + D.rows[shard] + " rows" : "");

function lanePath(op, lane) { // shards that take turns in a lane are groups of it
  const shard = op[OP.shard], scopes = D.scopes[op[OP.scopes]], path = scopes ? scopes.split("/") : [];
  return lane.turns && shard >= 0 ? ["shard " + shard + rowsOf(shard), ...path] : path;
}

const atHome = (op) => D.reasons[op[OP.home]] !== ""; // it carries rows of the batch, and all the same runs once
const quiet = (op) => !op[OP.ran] || ["Const", "NoOp"].includes(D.types[op[OP.type]]);

function buildTree() {
  const lanes = D.lanes.map((_, key) => newLane(key)), leaves = new Array(D.ops.length);
  D.ops.forEach((op, i) => {
    const lane = lanes[op[OP.lane]];
    let group = lane.root;
    for (const part of lanePath(op, lane)) {
      let next = group.byName.get(part);
      if (!next) { next = newGroup(part, group, lane); group.byName.set(part, next); group.children.push(next); }
      group = next;
    }
    const leaf = { op: i, label: D.labels[op[OP.label]], parent: group, lane, rank: i };
    group.children.push(leaf);
    leaves[i] = leaf;
  });
  lanes.forEach((lane) => finishGroup(lane.root));
  for (const lane of lanes) for (const child of lane.root.children) if (child.children && D.folded[child.label]) fold(child);
  return { lanes, leaves };
}

function fold(group) { // stays closed until somebody opens it
  group.folded = true;
  if (!group.lane.shard) group.label = D.folded[group.label];
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
  if (group.children.length > MOST || !group.parent) gatherAlike(group);
  if (!group.parent) gatherLoose(group);
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
  group.homes += op ? Number(atHome(op)) : child.homes;
  group.critical += op ? Number(CRITICAL.has(child.op)) : child.critical;
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
    run.folded = true;
    members.forEach((child) => { child.parent = run; run.children.push(child); });
    if (members.length > MOST) divide(run);
    run.children.forEach((child) => add(run, child));
    group.children.push(run);
  }
  group.children.sort((a, b) => a.rank - b.rank);
}

const stays = (child) => child.children || D.types[D.ops[child.op][OP.type]] === "Placeholder" || child.label.startsWith("rows of ");

function gatherLoose(lane) { // little work beside the layers (metrics, sums): what follows each other becomes one group
  const found = [];
  let run = [];
  const work = (items) => items.reduce((sum, item) => sum + (item.children ? item.flops : Math.max(D.ops[item.op][OP.flops], 0)), 0);
  const most = work(lane.children) * SMALL;
  const flush = () => {
    if (run.length < LOOSE || work(run) > most) { found.push(...run); run = []; return; }
    const group = newGroup(run.length + " others: " + run[0].label + " \u2026 " + run[run.length - 1].label, lane, lane.lane);
    group.folded = true;
    run.forEach((child) => { child.parent = group; group.children.push(child); add(group, child); });
    found.push(group);
    run = [];
  };
  for (const child of lane.children) {
    if (stays(child)) { flush(); found.push(child); } else run.push(child);
  }
  flush();
  lane.children = found;
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
  const called = (member) => member.label.split("/")[0];
  const run = newGroup(called(members[0]) + " \u2026 " + called(members[members.length - 1]), group, group.lane);
  members.forEach((child) => { child.parent = run; run.children.push(child); add(run, child); });
  return run;
}

function shown(item) { // the item itself, or the outermost closed group that hides it
  let visible = item;
  for (let group = item.parent; group && group.parent; group = group.parent) if (!group.open) visible = group;
  return visible;
}

const pathOf = (group) => (group.parent && group.parent.parent ? pathOf(group.parent) + "/" : "") + group.label;

function openUntil(tree, visible, most) { // open groups level by level, the same in all shards, while the view is small
  const seen = (groups) => groups.filter((group) => visible.includes(group.lane));
  let rows = visible.reduce((sum, lane) => sum + lane.root.children.length, 0);
  let level = tree.lanes.flatMap((lane) => lane.root.children);
  while (level.length) {
    const closed = new Map();
    for (const group of level.filter((child) => child.children && !child.quiet && !child.folded)) {
      const path = (group.lane.shard ? "s:" : "h:") + pathOf(group);
      closed.set(path, [...(closed.get(path) || []), group]);
    }
    const work = (groups) => groups.reduce((sum, group) => sum + group.flops + group.count, 0);
    level = [];
    for (const groups of [...closed.values()].sort((a, b) => work(b) - work(a))) {
      const more = seen(groups).reduce((sum, group) => sum + group.children.length, 0);
      if (rows + more > most) continue;
      rows += more;
      groups.forEach((group) => { group.open = true; level.push(...group.children); });
    }
  }
}
