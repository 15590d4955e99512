// The side panel, searching and selecting; and the start.
const inputs = new Map(), outputs = new Map();

function element(tag, text, parent, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  if (parent) parent.appendChild(made);
  return made;
}

function indexEdges() {
  for (let i = 0; i < D.edges.length; i += 3) {
    const [a, b, control] = [D.edges[i], D.edges[i + 1], D.edges[i + 2]];
    if (!inputs.has(b)) inputs.set(b, []);
    if (!outputs.has(a)) outputs.set(a, []);
    inputs.get(b).push([a, control]);
    outputs.get(a).push([b, control]);
  }
}

function reveal(item) {
  for (let group = item.parent; group; group = group.parent) group.open = true;
}

function select(item, scroll) {
  selected = item;
  near = new Set();
  if (!item.children) {
    for (const [other] of [...(inputs.get(item.op) || []), ...(outputs.get(item.op) || [])]) near.add(shown(tree.leaves[other]));
  }
  layout();
  if (scroll && item.row) {
    canvas.scrollTo({ top: item.row.y - canvas.clientHeight / 3, left: item.row.x - canvas.clientWidth / 3 });
    draw();
  }
  showDetails(item);
}

function goTo(op) {
  if (tree.leaves[op].lane.index < 0) $("shards").checked = true;
  reveal(tree.leaves[op]);
  select(tree.leaves[op], true);
}

function showDetails(item) {
  const panel = $("details");
  panel.textContent = "";
  element("h3", item.children ? item.label : D.ops[item.op][OP.name], panel);
  const table = element("table", undefined, panel);
  const line = (name, value) => {
    if (value === "" || value === undefined || value === null) return;
    const tr = element("tr", undefined, table);
    element("td", name, tr);
    const td = element("td", undefined, tr);
    if (value instanceof Node) td.appendChild(value); else td.textContent = value;
  };
  if (item.children) {
    line("operations", item.count);
    line("FLOPs", formatFlops(item.flops));
    line("outputs", formatBytes(item.bytes));
    line("on one device", item.homes ? item.homes + " carry rows of the batch" : "");
    line("critical", item.critical ? item.critical + " on the critical path" : "");
    return;
  }
  const op = D.ops[item.op];
  line("variable", D.variables[item.op]);
  line("critical", CRITICAL.has(item.op) ? "on the critical path" : "");
  line("type", D.types[op[OP.type]] + (op[OP.backward] ? " (backward pass)" : ""));
  line("requested", op[OP.requested] < 0 ? "nothing; TensorFlow decides" : deviceName(op[OP.requested]));
  if (D.actual) line("actual", op[OP.actual] < 0 ? "not in the graph that ran" : deviceName(op[OP.actual]));
  line("shard", op[OP.shard] < 0 ? (D.sharded ? "none: it runs once" : "") : op[OP.shard]);
  line("stage", D.stages[op[OP.stage]] && D.stages[op[OP.stage]] + (op[OP.backward] ? ", backward" : ", forward"));
  line("outputs", op[OP.shapes]);
  line("bytes", op[OP.bytes] ? formatBytes(op[OP.bytes]) : "");
  line("FLOPs", op[OP.flops] >= 0 ? formatFlops(op[OP.flops]) : "");
  line("source", D.sources[op[OP.source]]);
  line("reads", links(inputs.get(item.op)));
  line("feeds", links(outputs.get(item.op)));
  for (const reason of [D.reasons[op[OP.reason]], D.reasons[op[OP.home]]]) if (reason) element("div", reason, panel, "reason");
}

function links(others) {
  if (!others) return "";
  const box = element("div");
  others = [...new Map(others.map((other) => [other[0], other])).values()];
  for (const [op, control] of others.slice(0, 30)) {
    const a = element("a", D.ops[op][OP.name], element("div", undefined, box), "op");
    if (control) element("span", " (waits)", a.parentNode, "dim");
    a.onclick = () => goTo(op);
  }
  if (others.length > 30) element("div", "\u2026 and " + (others.length - 30) + " more", box, "dim");
  return box;
}

function search(text) {
  const box = $("results"), wanted = text.trim().toLowerCase();
  box.textContent = "";
  box.hidden = !wanted;
  if (!wanted) return;
  let found = 0;
  for (let i = 0; i < D.ops.length; i++) {
    const op = D.ops[i];
    if (!op[OP.name].toLowerCase().includes(wanted) && D.types[op[OP.type]].toLowerCase() !== wanted) continue;
    if (++found > 60) continue;
    const line = element("div", undefined, box);
    element("span", undefined, line, "dot").style.background = deviceColor(op[OP.device]);
    element("span", op[OP.name] + " ", line);
    element("small", D.types[op[OP.type]], line);
    line.onclick = () => { box.hidden = true; goTo(i); };
  }
  if (found > 60) element("div", found - 60 + " more; type on", box, "dim");
  if (!found) element("div", "Nothing found", box, "dim");
}

function showLegend() {
  const table = $("legend"), head = element("tr", undefined, table);
  for (const name of ["", "ops", "FLOPs", "params", "sent"]) element("th", name, head);
  for (const device of D.devices) {
    const tr = element("tr", undefined, table), first = element("td", undefined, tr);
    element("span", undefined, first, "dot").style.background = device.color;
    element("span", device.name, first);
    element("td", device.ops, tr);
    element("td", formatFlops(device.flops).replace("FLOPs", ""), tr);
    element("td", formatBytes(device.parameters), tr);
    element("td", formatBytes(device.sent), tr);
  }
  if (D.warnings.length) element("h2", "Worth knowing", $("warnings"));
  for (const warning of D.warnings) element("div", warning, $("warnings"), "reason");
}

function showSigns() { // what each mark of the drawing means
  const color = deviceColor(0), box = { x: 1, y: 1, width: 30, height: 14, rx: 3 };
  const signs = [
    ["a group of operations: click to open it", [["rect", { ...box, fill: color, opacity: 0.24 }]]],
    ["one operation: click for details", [["rect", { ...box, fill: color, opacity: 0.1 }], ["rect", { ...box, fill: "none", stroke: "var(--line)" }]]],
    ["left edge: its device", [["rect", { x: 1, y: 1, width: 5, height: 14, fill: color }]]],
    ["lower edge: its FLOPs, full for the largest operation", [["rect", { x: 1, y: 11, width: 18, height: 3, fill: color }]]],
    ["right edge: on the critical path", [["rect", { class: "path", x: 27, y: 1, width: 4, height: 14 }]]],
    ["\u2302 work on the batch that runs on one device", [["rect", { ...box, class: "home" }]]],
    ["dashed frame: an open group", [["rect", { ...box, class: "frame" }]]],
    ["tensors sent, in the colour of their sender; thicker is more", [["path", { d: "M1,8 H26", stroke: color, "stroke-width": 3, opacity: 0.65 }], ["path", { d: "M31,8 l-7,-4 l0,8 z", fill: color }]]],
  ];
  for (const [text, shapes] of signs) {
    const line = element("div", undefined, $("signs")), sign = node("svg", { width: 32, height: 16 }, line);
    for (const [tag, attributes] of shapes) node(tag, attributes, sign);
    element("span", text, line);
  }
}

function showMoves() { // gathered, then the largest one by one
  const all = D.transfers.reduce((sum, t) => sum + t[3], 0);
  $("routes-title").textContent = D.transfers.length ? "What moves, " + formatBytes(all) : "Nothing moves";
  for (const route of D.routes.slice(0, 12)) {
    const line = element("div", undefined, $("routes"), "route");
    element("div", route.text, line);
    element("small", route.note, line);
  }
  if (D.critical.length > 1) element("h2", "Critical path", $("path"));
  if (D.critical.length > 1) element("div", D.criticalText, $("path"), "dim");
  if (D.transfers.length) $("transfers-title").textContent = "The largest of " + D.transfers.length.toLocaleString("en") + " tensors";
  for (const { op, bytes, way, name } of D.largest) {
    const line = element("div", undefined, $("transfers"));
    element("b", formatBytes(bytes), line);
    element("i", way, line);
    element("span", "\u200e" + name, line);
    line.title = D.ops[op][OP.name];
    line.onclick = () => goTo(op);
  }
}

function showLanes() {
  $("lanes").textContent = "";
  for (const lane of lanes) {
    const many = !$("shards").checked && lane.alike > 1, what = many ? lane.together + " \u00d7 " + lane.alike : lane.what;
    const box = element("div", what ? what + " " : lane.note, $("lanes"), "lane");
    if (what) element("small", many ? lane.notes : lane.note, box);
    box.title = box.textContent + (many ? "; shown is " + lane.what + " on " + lane.note : "");
    Object.assign(box.style, { left: MARGIN / 2 + lane.index * (LANE + MARGIN) + "px", width: LANE + "px", borderColor: deviceColor(lane.device) });
  }
}

function everyGroup(group, act) {
  for (const child of group.children) if (child.children) { act(child); everyGroup(child, act); }
}

function start() {
  tree = buildTree();
  indexEdges();
  $("kind").textContent = `${D.ops.length.toLocaleString("en")} operations, ${D.actual ? "as they ran" : "as requested"}`;
  $("shards").parentNode.hidden = !D.lanes.some((lane) => lane.alike > 1);
  chooseLanes();
  openUntil(tree, lanes, 28 + 12 * Math.max(lanes.length, 2));
  showLegend();
  showSigns();
  showMoves();
  layout();
  svg.addEventListener("click", (event) => {
    const g = event.target.closest(".row");
    if (!g) return;
    if (g.item.children) g.item.open = !g.item.open;
    select(g.item, false);
    document.querySelector("aside").scrollTop = 0;
  });
  canvas.addEventListener("scroll", () => requestAnimationFrame(draw));
  window.addEventListener("resize", layout);
  $("search").addEventListener("input", (event) => search(event.target.value));
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.target.value = ""; search(""); }
    if (event.key === "Enter" && $("results").firstChild && $("results").firstChild.onclick) $("results").firstChild.onclick();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== $("search")) { event.preventDefault(); $("search").focus(); }
  });
  $("arrows").addEventListener("change", draw);
  $("critical").addEventListener("change", draw);
  for (const box of ["all", "shards"]) $(box).addEventListener("change", layout);
  $("panel").onclick = () => { document.querySelector("aside").classList.toggle("open"); };
  $("less").onclick = () => { tree.lanes.forEach((lane) => everyGroup(lane.root, (g) => { g.open = false; })); layout(); };
  $("more").onclick = () => {
    const closed = [];
    tree.lanes.forEach((lane) => everyGroup(lane.root, (g) => { if (!g.open && shown(g) === g) closed.push(g); }));
    closed.forEach((g) => { g.open = true; });
    layout();
  };
  document.body.dataset.firstViewMs = Math.round(performance.now());
}
start();
