// Layout and drawing: lanes side by side, rows in the order of execution, only what is in view is in the document.
const ROW = 34, GAP = 8, INDENT = 12, TOP = 12;
let LANE = 230, MARGIN = 74; // widths of a lane and of the room between two
const svg = document.getElementById("graph"), canvas = document.getElementById("canvas");
const $ = (id) => document.getElementById(id);
let tree, lanes = [], rows = [], frames = [], arrows = [], selected = null, near = new Set();

function node(tag, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function outline(group, depth, into) { // rows of one lane, groups before their members
  for (const child of group.children) {
    child.row = null;
    const isQuiet = child.children ? child.quiet && !child.open : quiet(D.ops[child.op]);
    if (isQuiet && child !== selected && !$("all").checked) continue;
    const row = { item: child, depth, lane: child.lane, end: null };
    into.push(row);
    child.row = row;
    if (child.children && child.open) {
      outline(child, depth + 1, into);
      const last = into[into.length - 1];
      if (last !== row) row.end = last;
    }
  }
  return into;
}

function chooseLanes() { // one of those that are alike stands for all of them, unless all are asked for
  lanes = tree.lanes.filter((lane) => ($("shards").checked || lane.like === lane.key) && lane.root.children.length);
  tree.lanes.forEach((lane) => { lane.index = -1; });
  lanes.forEach((lane, k) => { lane.index = k; });
  const room = canvas.clientWidth - 16;
  MARGIN = Math.max(22, Math.min(190, Math.floor(room / lanes.length) - 190));
  LANE = Math.max(130, Math.min(520, Math.floor(room / lanes.length) - MARGIN));
}

function layout() {
  chooseLanes();
  const before = feeds();
  const columns = lanes.map((lane) => ({ lane, list: outline(lane.root, 0, []), at: 0, y: TOP }));
  rows = [];
  for (;;) { // merge the lanes in the order of execution, so that a row is not above what it waits for
    let best = null;
    for (const l of columns) {
      if (l.at < l.list.length && (!best || place(l.list[l.at].item) < place(best.list[best.at].item))) best = l;
    }
    if (!best) break;
    const row = best.list[best.at++];
    let y = best.y;
    for (const source of before.get(row.item) || []) {
      if (source.row && source.row.y !== undefined && source.row.placed === layout.round) y = Math.max(y, source.row.y + 16);
    }
    row.y = y;
    row.placed = layout.round;
    row.x = MARGIN / 2 + row.lane.index * (LANE + MARGIN) + row.depth * INDENT;
    row.w = LANE - row.depth * INDENT;
    best.y = y + ROW + GAP;
    rows.push(row);
  }
  layout.round++;
  for (const { lane, list } of columns) lane.tops = list.map((row) => row.y);
  frames = rows.filter((row) => row.end).map((row) => ({ row, bottom: row.end }));
  const height = Math.max(...columns.map((l) => l.y)) + 40, width = lanes.length * (LANE + MARGIN);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  showLanes();
  $("lanes").style.width = width + "px";
  draw();
}
layout.round = 1;

function draw() { // only what is in the window, and a little more
  const top = canvas.scrollTop - 600, bottom = canvas.scrollTop + canvas.clientHeight + 600;
  svg.textContent = "";
  for (const { row, bottom: last } of frames) {
    if (row.y < bottom && last.y > top) {
      node("rect", { class: "frame", x: row.x - 4, y: row.y - 4, width: row.w + 8, height: last.y - row.y + ROW + 8 }, svg);
    }
  }
  const back = node("g", {}, svg);
  for (const row of rows) if (row.y < bottom && row.y + ROW > top) drawRow(row);
  drawLinks(back);
  if ($("arrows").checked) drawArrows(back, top, bottom);
}

function drawRow(row) {
  const item = row.item, op = item.children ? null : D.ops[item.op];
  const device = op ? op.device : row.lane.device, color = deviceColor(device);
  const marks = (item === selected ? " on" : "") + (near.has(item) ? " near" : "") + (op && !op.ran ? " gone" : "");
  const g = node("g", { class: "row" + marks, transform: `translate(${row.x},${row.y})` }, svg);
  g.item = item;
  const box = node("rect", { class: "box", width: row.w, height: ROW, fill: "var(--paper)" }, g);
  node("rect", { width: row.w, height: ROW, rx: 5, fill: color, opacity: op ? 0.1 : 0.24, "pointer-events": "none" }, g);
  node("rect", { width: 5, height: ROW, rx: 2, fill: color }, g);
  const share = D.mostFlops ? (op ? op.flops : item.flops) / D.mostFlops : 0;
  if (share > 0.002) node("rect", { x: 5, y: ROW - 3, width: Math.min(share, 1) * (row.w - 5), height: 3, fill: color }, g);
  const homes = op ? Number(atHome(op)) : item.homes;
  if (homes) node("rect", { class: "home", x: 1, y: 1, width: row.w - 2, height: ROW - 2 }, g);
  const mark = (homes ? "\u2302 " : "") + (item.children ? (item.open ? "\u25be " : "\u25b8 ") : "");
  node("text", { x: 12, y: 14 }, g, fit(mark + item.label, row.w - 20, 12));
  node("text", { class: "sub", x: 12, y: 27 }, g, subtitle(item, op, row.w - 20));
  node("title", {}, box, op ? op.name + "\n" + op.type + " on " + deviceName(device) : item.label + ": " + item.count + " operations");
}

const onceHere = (leaf) => (leaf.lane.shard && D.ops[leaf.op].shard === null ? "runs once" : "");

function subtitle(item, op, width) { // what does not fit is left out, from the end
  const parts = op
    ? [op.type, op.ran ? "" : "(not run)", atHome(op) ? "on one device" : onceHere(item), op.outputs]
    : [item.count + " ops", item.flops ? formatFlops(item.flops) : "", item.bytes ? formatBytes(item.bytes) : "",
      item.homes ? item.homes + " on one device" : ""];
  const kept = parts.filter(Boolean), join = () => kept.join(op ? "  " : " \u00b7 ");
  while (kept.length > 1 && measure(join(), 10.5) > width) kept.pop();
  return fit(join(), width, 10.5);
}

const ruler = document.createElement("canvas").getContext("2d");

function measure(text, size, weight = 400) {
  ruler.font = weight + " " + size + "px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  return ruler.measureText(text).width;
}

function fit(text, width, size) { // the middle is cut out of what is too long
  const full = measure(text, size);
  if (full <= width) return text;
  const most = Math.max(Math.floor((text.length * width) / full) - 2, 4);
  return text.slice(0, Math.ceil(most * 0.5)) + "\u2026" + text.slice(text.length - Math.floor(most * 0.5));
}
