// Layout and drawing: lanes side by side, rows in the order of execution, only what is in view is in the document.
const MOST_ARROWS = 160; // the largest in view, and all of what is selected
const ROW = 34, GAP = 8, MARGIN = 74, INDENT = 12, TOP = 12;
let LANE = 230;
const svg = document.getElementById("graph"), canvas = document.getElementById("canvas");
const $ = (id) => document.getElementById(id);
let tree, rows = [], frames = [], arrows = [], selected = null, near = new Set();

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
}

function feeds() { // for every visible item, the visible items of other lanes that send it something
  const map = new Map();
  arrows = [];
  const byPair = new Map();
  for (const [source, from, to, bytes, readers] of D.transfers) {
    const a = shown(tree.leaves[source]), b = shown(tree.leaves[readers[0]]);
    if (a === b) continue;
    let known = byPair.get(a);
    if (!known) byPair.set(a, (known = new Map()));
    let arrow = known.get(b);
    if (!arrow) { arrow = { a, b, from, to, bytes: 0, count: 0 }; known.set(b, arrow); arrows.push(arrow); }
    arrow.bytes += bytes;
    arrow.count++;
  }
  for (let i = 0; i < D.edges.length; i += 3) {
    const x = tree.leaves[D.edges[i]], y = tree.leaves[D.edges[i + 1]];
    if (D.edges[i + 2] || x.lane === y.lane) continue;
    const a = shown(x), b = shown(y);
    if (!map.has(b)) map.set(b, new Set());
    map.get(b).add(a);
  }
  return map;
}

function layout() {
  const room = (canvas.clientWidth - 20) / tree.lanes.length - MARGIN;
  LANE = Math.max(150, Math.min(280, Math.floor(room)));
  const before = feeds();
  const lanes = tree.lanes.map((lane) => { const list = []; outline(lane.root, 0, list); return { lane, list, at: 0, y: TOP }; });
  rows = [];
  for (;;) { // merge the lanes in the order of execution, so that a row is not above what it waits for
    let best = null;
    for (const l of lanes) {
      if (l.at < l.list.length && (!best || l.list[l.at].item.rank < best.list[best.at].item.rank)) best = l;
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
  frames = rows.filter((row) => row.end).map((row) => ({ row, bottom: row.end }));
  const height = Math.max(...lanes.map((l) => l.y)) + 40, width = MARGIN + tree.lanes.length * (LANE + MARGIN);
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
  if ($("arrows").checked) drawArrows(back, top, bottom);
  drawLinks();
}

function drawRow(row) {
  const item = row.item, op = item.children ? null : D.ops[item.op];
  const device = op ? op[OP.device] : row.lane.device, color = deviceColor(device);
  const marks = (item === selected ? " on" : "") + (near.has(item) ? " near" : "") + (op && !op[OP.ran] ? " gone" : "");
  const g = node("g", { class: "row" + marks, transform: `translate(${row.x},${row.y})` }, svg);
  g.item = item;
  const box = node("rect", { class: "box", width: row.w, height: ROW, fill: "var(--paper)" }, g);
  node("rect", { width: row.w, height: ROW, rx: 5, fill: color, opacity: op ? 0.1 : 0.24, "pointer-events": "none" }, g);
  node("rect", { width: 5, height: ROW, rx: 2, fill: color }, g);
  const share = D.mostFlops ? (op ? Math.max(op[OP.flops], 0) : item.flops) / D.mostFlops : 0;
  if (share > 0.002) node("rect", { x: 5, y: ROW - 3, width: Math.min(share, 1) * (row.w - 5), height: 3, fill: color }, g);
  const mark = item.children ? (item.open ? "\u25be " : "\u25b8 ") : "";
  node("text", { x: 12, y: 14 }, g, fit(mark + (op && D.variables[item.op] ? D.variables[item.op] : item.label), row.w - 18, 12));
  node("text", { class: "sub", x: 12, y: 27 }, g, subtitle(item, op, row.w - 18));
  node("title", {}, box, op ? op[OP.name] + "\n" + D.types[op[OP.type]] + " on " + deviceName(device) : item.label + ": " + item.count + " operations");
}

function subtitle(item, op, width) { // what does not fit is left out, from the end
  const parts = op
    ? [D.types[op[OP.type]], op[OP.ran] ? "" : "(not run)", op[OP.shapes]]
    : [item.count + " ops", item.flops ? formatFlops(item.flops) : "", item.bytes ? formatBytes(item.bytes) : ""];
  const kept = parts.filter(Boolean), join = () => kept.join(op ? "  " : " \u00b7 ");
  while (kept.length > 1 && measure(join(), 10.5) > width) kept.pop();
  return fit(join(), width, 10.5);
}

const ruler = document.createElement("canvas").getContext("2d");

function measure(text, size) {
  ruler.font = size + "px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  return ruler.measureText(text).width;
}

function fit(text, width, size) { // the middle is cut out of what is too long
  const full = measure(text, size);
  if (full <= width) return text;
  const most = Math.max(Math.floor((text.length * width) / full) - 2, 4);
  return text.slice(0, Math.ceil(most * 0.5)) + "\u2026" + text.slice(text.length - Math.floor(most * 0.5));
}

function ends(a, b) { // where a curve between two rows leaves and arrives
  const right = b.row.lane.index > a.row.lane.index;
  if (a.row.lane.index === b.row.lane.index) return null;
  const x1 = right ? a.row.x + a.row.w : a.row.x, x2 = right ? b.row.x : b.row.x + b.row.w;
  return { x1, x2, y1: a.row.y + ROW / 2, y2: b.row.y + ROW / 2 };
}

function curve(e) {
  const bend = (e.x2 - e.x1) * 0.5;
  return `M${e.x1},${e.y1} C${e.x1 + bend},${e.y1} ${e.x2 - bend},${e.y2} ${e.x2},${e.y2}`;
}

function drawArrows(layer, top, bottom) {
  const drawn = arrows.filter((t) => t.a.row && t.b.row && Math.min(t.a.row.y, t.b.row.y) < bottom && Math.max(t.a.row.y, t.b.row.y) > top);
  drawn.sort((a, b) => b.bytes - a.bytes);
  const labels = [];
  const chosen = drawn.filter((arrow) => arrow.a === selected || arrow.b === selected);
  const most = Math.max(MOST_ARROWS - chosen.length, 0);
  const crowd = Math.min(1, 40 / drawn.length);
  for (const arrow of [...chosen, ...drawn.filter((arrow) => !chosen.includes(arrow)).slice(0, most)]) {
    const e = ends(arrow.a, arrow.b);
    if (!e) continue;
    const color = deviceColor(arrow.from), own = chosen.includes(arrow);
    const width = 1 + Math.min(5, Math.log10(1 + arrow.bytes / 1000)) * (own ? 1 : 0.35 + 0.65 * crowd);
    const look = { class: "arrow", d: curve(e), stroke: color, "stroke-width": width, opacity: own ? 1 : 0.25 + 0.4 * crowd };
    const path = node("path", look, layer);
    const what = arrow.count + (arrow.count === 1 ? " tensor" : " tensors");
    node("title", {}, path, `${formatBytes(arrow.bytes)} in ${what}, ${deviceName(arrow.from)} \u2192 ${deviceName(arrow.to)}`);
    const side = e.x2 > e.x1 ? -1 : 1;
    node("path", { class: "arrow", d: `M${e.x2},${e.y2} l${side * 7},-4 l0,8 z`, style: `fill:${color}` }, layer);
    labels.push([arrow.bytes, e, color]);
  }
  placeLabels(labels);
}

function placeLabels(labels) { // the largest first, near the arrowhead; none on top of another
  const taken = [];
  for (const [bytes, e, color] of labels.slice(0, 160)) {
    const right = e.x2 > e.x1, x = e.x2 + (right ? -12 : 12), y = e.y2 - 5;
    if (taken.some(([u, v]) => Math.abs(u - x) < 60 && Math.abs(v - y) < 12)) continue;
    taken.push([x, y]);
    node("text", { class: "bytes", x, y, "text-anchor": right ? "end" : "start", style: `fill:${color}` }, svg, formatBytes(bytes));
  }
}

function drawLinks() { // what the selected operation reads and feeds
  if (!selected || selected.children || !selected.row) return;
  for (const item of near) {
    if (!item.row || item === selected) continue;
    const e = ends(selected, item);
    const a = selected.row, b = item.row;
    const d = e ? curve(e) : `M${a.x},${a.y + ROW / 2} C${a.x - 42},${a.y + ROW / 2} ${b.x - 42},${b.y + ROW / 2} ${b.x},${b.y + ROW / 2}`;
    node("path", { class: "link", d }, svg);
  }
}
