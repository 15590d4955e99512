"use strict";
// The data of the page, and the tree of groups: lane (shard or device) -> name scopes -> operations. What they are called
// and how they belong together is in the data.
const D = JSON.parse(document.getElementById("data").textContent);
D.ops = D.ops.map((op) => ({ ...D.usual, ...op }));
const ALIKE = 4; // so many operations or more whose names differ by a number are one group

function units(value, names) {
  let i = 0;
  while (value >= 1000 && i < names.length - 1) { value /= 1000; i++; }
  return (i ? value.toFixed(value < 10 ? 1 : 0) : value) + " " + names[i];
}
const formatBytes = (n) => units(n, ["B", "kB", "MB", "GB", "TB"]);
const formatFlops = (n) => units(n, ["FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs"]);
const deviceColor = (d) => (d < 0 ? "#8b949e" : D.devices[d].color);
const deviceName = (d) => (d < 0 ? "none" : D.devices[d].name);

function newGroup(label, parent, lane, depth = 0) {
  return { label, parent, lane, depth, children: [], byName: new Map(), open: !parent, count: 0, flops: 0, bytes: 0, rank: 1e9,
    work: 1e9, quiet: true, homes: 0, folded: false };
}

function newLane(key) {
  const { work, device, shards, like, alike, together, note, notes } = D.lanes[key];
  const what = work || (D.sharded ? "runs once" : "");
  const lane = { key, device, what, note, together, notes, like, alike, shard: shards.length > 0, turns: shards.length > 1 };
  lane.root = newGroup("", null, lane);
  return lane;
}

const rowsOf = (shard) => (D.rows[shard] ? ", " + D.rows[shard] + " rows" : "");

const stem = (label) => label.replace(/_\d+(?=$| \(|\))/g, ""); // of `Add_1` and of `Add_2 (reduce_3)`

function levelsOf(op, lane) { // the groups that an operation is in, and their depths; a layer `conv2_block1_bn` is in those of its block
  const { shard, scopes } = op, levels = [];
  const path = scopes ? scopes.split("/") : [], turn = lane.turns && shard !== null; // shards that take turns in a lane are groups of it
  if (turn) path.unshift("shard " + shard + rowsOf(shard));
  path.forEach((part, depth) => {
    if (depth || !turn) for (const number of part.matchAll(/\d(?=_)/g)) levels.push([part.slice(0, number.index + 1), depth]);
    levels.push([part, depth]);
  });
  return [...levels, [stem(op.label), path.length]];
}

function pathOfOp(i) {
  const { scopes, label } = D.ops[i];
  return scopes ? scopes + "/" + label : label;
}

const layerOf = (path) => path.replace(/^gradient_tape\//, ""); // a layer is its backward pass, too

function devicesOf(ops) { // each once, in their order
  return [...new Set(ops.map((i) => D.ops[i].device))].sort((a, b) => a - b);
}

function devicesText(devices) { // "CPU:0, GPU:0 to 3, 7"
  const spans = [];
  for (const name of devices.map(deviceName)) {
    const [, kind, number] = name.match(/^(.*?)(\d*)$/), last = spans[spans.length - 1], same = last && last.kind === kind;
    if (same && last.end + 1 === +number) last.end = +number; else spans.push({ text: same ? number : name, kind, start: +number, end: +number });
  }
  return spans.map((span) => (span.end > span.start ? span.text + " to " + span.end : span.text)).join(", ");
}

const atHome = (op) => op.unsharded_reason !== ""; // it carries rows of the batch, and all the same runs once
const quiet = (op) => !op.ran || ["Const", "NoOp"].includes(op.type);

function buildTree() {
  const lanes = D.lanes.map((_, key) => newLane(key)), leaves = new Array(D.ops.length);
  D.ops.forEach((op, i) => {
    const lane = lanes[op.lane];
    let group = lane.root;
    const levels = levelsOf(op, lane), depth = levels[levels.length - 1][1];
    for (const [part, at] of levels) {
      let next = group.byName.get(part);
      if (!next) { next = newGroup(part, group, lane, at); group.byName.set(part, next); group.children.push(next); }
      group = next;
    }
    group.alike = true;
    const leaf = { op: i, label: op.label, parent: group, lane, depth, rank: i, work: op.shard === null ? 1e9 : i };
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
    while (child.children.length === 1) { // a chain of groups with one member each is one name
      const only = child.children[0];
      if (only.depth > child.depth) only.label = child.label + "/" + only.label; // else it is a finer name of the same
      Object.assign(only, { depth: child.depth, parent: group });
      child = only;
      if (!child.children) break;
    }
    group.children[i] = child;
  }
  group.children = group.children.flatMap((child) => (child.children ? membersOf(child, group) : [child]));
  group.children.forEach((child) => { child.parent = group; add(group, child); });
  group.children.sort((a, b) => place(a) - place(b));
}

function membersOf(group, parent) { // itself, or a few operations alike; many, AddN, AddN_1, ..., are a group, closed until somebody opens it
  if (!group.alike || group.children.some((child) => child.children)) return [group];
  if (group.children.length < ALIKE || parent.children.length === 1) return group.children;
  group.label += " \u00d7 " + group.children.length;
  Object.assign(group, { folded: true, alike: false });
  return [group];
}

function add(group, child) {
  const op = child.children ? null : D.ops[child.op];
  group.count += op ? 1 : child.count;
  group.flops += op ? op.flops : child.flops;
  group.bytes += op ? op.output_bytes : child.bytes;
  group.rank = Math.min(group.rank, child.rank);
  group.work = Math.min(group.work, child.work);
  group.quiet = group.quiet && (op ? quiet(op) : child.quiet);
  group.homes += op ? Number(atHome(op)) : child.homes;
}

function shown(item) { // the item itself, or the outermost closed group that hides it
  let visible = item;
  for (let group = item.parent; group && group.parent; group = group.parent) if (!group.open) visible = group;
  return visible;
}

const pathOf = (group) => (group.parent && group.parent.parent ? pathOf(group.parent) + "/" : "") + group.label;

function everyGroup(group, act) {
  for (const child of group.children) if (child.children) { act(child); everyGroup(child, act); }
}

function closedGroups(group) { // in a group, those that are seen
  return group.children.flatMap((child) => (!child.children ? [] : child.open ? closedGroups(child) : [child]));
}

const allClosed = () => tree.lanes.flatMap((lane) => closedGroups(lane.root));

function openUntil(most) { // open groups, the outermost with most work first, the same in all lanes, while each has few rows
  const tooLarge = new Set(), work = (group) => group.flops + group.count;
  const depthOf = (group) => (group.parent ? 1 + depthOf(group.parent) : 0);
  for (;;) {
    const closed = allClosed().filter((group) => !group.quiet && !group.folded && !tooLarge.has(pathOf(group)));
    if (!closed.length) return;
    const [first] = closed.sort((a, b) => depthOf(a) - depthOf(b) || work(b) - work(a)), alike = closed.filter((group) => pathOf(group) === pathOf(first));
    alike.forEach((group) => { group.open = true; });
    if (lanes.every((lane) => outline(lane.root, 0, []).length <= most)) continue;
    alike.forEach((group) => { group.open = false; });
    if (first.parent.parent) return; // (no smaller layer is opened in its place)
    tooLarge.add(pathOf(first));
  }
}
