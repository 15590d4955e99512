// What moves between lanes: tensors that cross devices, gathered by where they leave and arrive.
const MOST_ARROWS = 160; // the largest in view, and all of what is selected

function feeds() { // for every visible item, the visible items of other lanes that send it something
  const map = new Map();
  arrows = [];
  const byPair = new Map();
  for (const [source, from, , bytes, readers, kind, way] of D.transfers) {
    const x = tree.leaves[source], y = tree.leaves[readers[0]];
    if (x.lane.index < 0 || y.lane.index < 0) continue;
    const a = shown(x), b = shown(y);
    if (a === b) continue;
    let known = byPair.get(a);
    if (!known) byPair.set(a, (known = new Map()));
    let arrow = known.get(b);
    if (!arrow) { arrow = { a, b, from, way, bytes: 0, count: 0, kinds: new Map() }; known.set(b, arrow); arrows.push(arrow); }
    arrow.bytes += bytes;
    arrow.count++;
    arrow.kinds.set(kind, (arrow.kinds.get(kind) || 0) + bytes);
  }
  for (let i = 0; i < D.edges.length; i += 3) {
    const x = tree.leaves[D.edges[i]], y = tree.leaves[D.edges[i + 1]];
    if (D.edges[i + 2] || x.lane === y.lane || x.lane.index < 0 || y.lane.index < 0) continue;
    const a = shown(x), b = shown(y);
    if (!map.has(b)) map.set(b, new Set());
    map.get(b).add(a);
  }
  return map;
}

function ends(a, b) { // where a curve between two rows leaves and arrives
  const right = b.row.lane.index > a.row.lane.index;
  if (a.row.lane.index === b.row.lane.index) return null;
  const x1 = right ? a.row.x + a.row.w : a.row.x, x2 = right ? b.row.x : b.row.x + b.row.w;
  const e = { x1, x2, y1: a.row.y + ROW / 2, y2: b.row.y + ROW / 2, passes: [] };
  const step = right ? 1 : -1;
  for (let k = a.row.lane.index + step; k !== b.row.lane.index; k += step) {
    const left = MARGIN / 2 + k * (LANE + MARGIN) - 8, wide = LANE + 16;
    const y = gapNear(lanes[k], e.y1 + ((e.y2 - e.y1) * (left + wide / 2 - x1)) / (x2 - x1));
    e.passes.push(right ? { in: left, out: left + wide, y } : { in: left + wide, out: left, y });
  }
  return e;
}

function gapNear(lane, y) { // the place between two rows of a lane, or beside all of them, that is nearest to y
  let best = Infinity, above = -Infinity;
  for (const top of [...lane.tops, Infinity]) {
    const near = Math.min(Math.max(y, above + GAP / 2), top - GAP / 2);
    if (Math.abs(near - y) < Math.abs(best - y)) best = near;
    above = top + ROW;
  }
  return best;
}

function curve(e) { // a lane on the way is passed between its rows
  let d = `M${e.x1},${e.y1}`, x = e.x1, y = e.y1;
  for (const stop of [...e.passes, { in: e.x2, out: e.x2, y: e.y2 }]) {
    const bend = (stop.in - x) * 0.5;
    d += ` C${x + bend},${y} ${stop.in - bend},${stop.y} ${stop.in},${stop.y} H${stop.out}`;
    [x, y] = [stop.out, stop.y];
  }
  return d;
}

const LABEL = 112; // the room that the name of what is sent needs; where there is less, bytes alone are said

function timesOf(arrow) { // once for each lane on another device, or for each pair of those alike
  const alike = (item) => tree.lanes.filter((lane) => lane.like === item.lane.like);
  const [few, many] = [alike(arrow.a), alike(arrow.b)].sort((a, b) => a.length - b.length);
  return few.length > 1 ? few.length : many.filter((lane) => lane.device !== few[0].device).length;
}

function labelOf(arrow) { // what is most of it, and how much: the same goes to, or comes from, all that are alike
  const [[most]] = [...arrow.kinds].sort((a, b) => b[1] - a[1]), { kind } = D.moves[most], count = timesOf(arrow);
  const times = $("shards").checked || count < 2 ? "" : " \u00d7 " + count;
  const size = formatBytes(arrow.bytes) + times, full = kind + (arrow.kinds.size > 1 ? ", \u2026 " : " ") + size;
  return MARGIN >= LABEL && measure(full, 10.5, 600) <= MARGIN - 20 ? full : size;
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
    const each = [...arrow.kinds].sort((a, b) => b[1] - a[1]).map(([kind, bytes]) => `${D.moves[kind].kind}: ${formatBytes(bytes)}`);
    const what = arrow.count + (arrow.count === 1 ? " tensor" : " tensors");
    node("title", {}, path, [`${formatBytes(arrow.bytes)} in ${what}, ${arrow.way}`, ...each].join("\n"));
    const side = e.x2 > e.x1 ? -1 : 1;
    node("path", { class: "arrow", d: `M${e.x2},${e.y2} l${side * 7},-4 l0,8 z`, style: `fill:${color}` }, layer);
    labels.push([arrow.bytes, e, color, own || MARGIN >= 60 ? labelOf(arrow) : ""]);
  }
  placeLabels(labels);
}

function placeLabels(labels) { // the largest first, near the arrowhead; none on top of another
  const taken = [];
  for (const [, e, color, text] of labels.filter((label) => label[3]).slice(0, 160)) {
    const right = e.x2 > e.x1, x = e.x2 + (right ? -12 : 12), y = e.y2 - 5, wide = measure(text, 10.5, 600) + 6;
    const left = right ? x - wide + 3 : x - 3;
    if (taken.some(([u, v, w]) => u < left + wide && left < u + w && Math.abs(v - y) < 12)) continue;
    taken.push([left, y, wide]);
    node("rect", { class: "behind", x: left, y: y - 9, width: wide, height: 12 }, svg);
    node("text", { class: "bytes", x, y, "text-anchor": right ? "end" : "start", style: `fill:${color}` }, svg, text);
  }
}

function drawLinks(layer) { // what the selected operation reads and feeds
  if (!selected || selected.children || !selected.row) return;
  for (const item of new Set(neighbours(selected.op).map((other) => shown(tree.leaves[other])))) {
    if (!item.row || item === selected) continue;
    const e = ends(selected, item);
    const a = selected.row, b = item.row;
    const d = e ? curve(e) : `M${a.x},${a.y + ROW / 2} C${a.x - 42},${a.y + ROW / 2} ${b.x - 42},${b.y + ROW / 2} ${b.x},${b.y + ROW / 2}`;
    node("path", { class: "link", d }, layer);
  }
}
