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
    work: 1e9, quiet: true, homes: 0, critical: 0, folded: false };
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

function pathOfOp(i) {
  const scopes = D.scopes[D.ops[i][OP.scopes]], label = D.labels[D.ops[i][OP.label]];
  return scopes ? scopes + "/" + label : label;
}

const layerOf = (path) => path.replace(/^gradient_tape\//, ""); // a layer is its backward pass, too

function devicesOf(ops) { // each once, in their order
  return [...new Set(ops.map((i) => D.ops[i][OP.device]))].sort((a, b) => a - b);
}

function devicesText(devices) { // "CPU:0, GPU:0 to 3, 7"
  const spans = [];
  for (const name of devices.map(deviceName)) {
    const [, kind, number] = name.match(/^(.*?)(\d*)$/), last = spans[spans.length - 1], same = last && last.kind === kind;
    if (same && last.end + 1 === +number) last.end = +number; else spans.push({ text: same ? number : name, kind, start: +number, end: +number });
  }
  return spans.map((span) => (span.end > span.start ? span.text + " to " + span.end : span.text)).join(", ");
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
    const leaf = { op: i, label: D.labels[op[OP.label]], parent: group, lane, rank: i, work: op[OP.shard] < 0 ? 1e9 : i };
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

// A layer stands where its work on rows begins: what it reads may be there long before.
const place = (item) => (item.work < 1e9 ? item.work : item.rank);

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
  group.children.sort((a, b) => place(a) - place(b));
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
  group.work = Math.min(group.work, child.work);
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
  group.children.sort((a, b) => place(a) - place(b));
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

function divide(group) { // into runs of consecutive members: those whose names begin alike, else as many in each
  const all = group.children, named = [3, 2, 1].map((parts) => runsBy(all, parts)).find((runs) => runs.length > 1 && runs.length <= MOST / 2);
  if (named) {
    group.children = named.map(([name, run]) => (run.length < 2 ? run[0] : runOf(run, group, name)));
    return;
  }
  const groups = all.filter((child) => child.children).length; // stay as they are, unless they are too many
  const size = Math.max(MOST / 2, Math.ceil(all.length / MOST));
  group.children = [];
  let run = [];
  const flush = () => {
    if (run.length < 2) group.children.push(...run); else group.children.push(runOf(run, group, called(run[0]) + " \u2026 " + called(run[run.length - 1])));
    run = [];
  };
  for (const child of all) {
    if (child.children && groups <= MOST) { flush(); group.children.push(child); continue; }
    run.push(child);
    if (run.length >= size) flush();
  }
  flush();
}

const called = (member) => member.label.split("/")[0];

function runsBy(members, parts) { // consecutive members whose names have the same first parts, `conv2_block1` of `conv2_block1_1_bn`
  const runs = [];
  for (const member of members) {
    const name = called(member).split("_").slice(0, parts).join("_"), last = runs[runs.length - 1];
    if (last && last[0] === name) last[1].push(member); else runs.push([name, [member]]);
  }
  return runs;
}

function runOf(members, group, label) {
  const run = newGroup(label, group, group.lane);
  members.forEach((child) => { child.parent = run; run.children.push(child); add(run, child); });
  if (run.children.length > MOST) divide(run);
  return run;
}

function shown(item) { // the item itself, or the outermost closed group that hides it
  let visible = item;
  for (let group = item.parent; group && group.parent; group = group.parent) if (!group.open) visible = group;
  return visible;
}

const pathOf = (group) => (group.parent && group.parent.parent ? pathOf(group.parent) + "/" : "") + group.label;

function openUntil(tree, visible, most) { // open groups level by level, the same in all lanes, while each has few rows
  const rows = new Map(visible.map((lane) => [lane, lane.root.children.length]));
  let level = tree.lanes.flatMap((lane) => lane.root.children);
  for (let depth = 0, fits = true; fits && level.length; depth++) {
    const closed = new Map();
    for (const group of level.filter((child) => child.children && !child.quiet && !child.folded)) {
      closed.set(pathOf(group), [...(closed.get(pathOf(group)) || []), group]);
    }
    const work = (groups) => groups.reduce((sum, group) => sum + group.flops + group.count, 0);
    level = [];
    for (const groups of [...closed.values()].sort((a, b) => work(b) - work(a))) {
      const seen = groups.filter((group) => rows.has(group.lane));
      if (seen.some((group) => rows.get(group.lane) + group.children.length > most)) {
        fits = false;
        if (depth) break; else continue; // (no smaller layer is opened in its place)
      }
      seen.forEach((group) => { rows.set(group.lane, rows.get(group.lane) + group.children.length); });
      groups.forEach((group) => { group.open = true; level.push(...group.children); });
    }
  }
}
