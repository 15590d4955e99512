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

const opsOf = (item) => (item.children ? item.children.flatMap(opsOf) : [item.op]);

const neighbours = (op) => [...(inputs.get(op) || []), ...(outputs.get(op) || [])].map(([other]) => other);

function select(item, scroll, ops = opsOf(item), name = item.label) { // an operation, a group, or a layer: all its operations
  selected = item;
  near = new Set((ops.length > 1 ? ops : neighbours(item.op)).map((other) => shown(tree.leaves[other])));
  near.delete(item);
  layout();
  if (scroll && item.row) {
    canvas.scrollTo({ top: item.row.y - canvas.clientHeight / 3, left: item.row.x - canvas.clientWidth / 3 });
    draw();
  }
  showDetails(item, ops, name);
}

const goTo = (op) => goToLayer("", [op]);

function goToLayer(name, ops) { // where most of its work is: the largest group in one column that holds nothing else
  const own = new Set(ops), inView = ops.filter((op) => tree.leaves[op].lane.index >= 0);
  let item = tree.leaves[inView.find((op) => tree.leaves[op].lane.shard) ?? inView[0] ?? ops[0]];
  if (item.lane.index < 0) $("shards").checked = true;
  while (item.parent.parent && opsOf(item.parent).every((op) => own.has(op))) item = item.parent;
  reveal(item);
  select(item, true, ops, name);
}

function showDetails(item, ops, name) {
  const panel = $("details");
  panel.textContent = "";
  element("h3", ops.length > 1 ? name : D.ops[item.op].name, panel);
  const table = element("table", undefined, panel);
  const line = (name, value) => {
    if (value === "" || value === undefined || value === null) return;
    const tr = element("tr", undefined, table);
    element("td", name, tr);
    const td = element("td", undefined, tr);
    if (value instanceof Node) td.appendChild(value); else td.textContent = value;
  };
  if (ops.length > 1) {
    const sum = (count) => ops.reduce((total, i) => total + Math.max(Number(count(D.ops[i], i)), 0), 0);
    const homes = sum(atHome);
    line("operations", ops.length);
    line("devices", devicesText(devicesOf(ops)));
    line("FLOPs", formatFlops(sum((op) => op.flops)));
    line("outputs", formatBytes(sum((op) => op.output_bytes)));
    line("on one device", homes ? homes + " carry rows of the batch" : "");
    showMembers(ops, name, panel);
    return;
  }
  const op = D.ops[item.op];
  line("variable", op.variable);
  line("type", op.type + (op.backward ? " (backward pass)" : ""));
  line("requested", op.requested < 0 ? "nothing; TensorFlow decides" : deviceName(op.requested));
  if (D.actual) line("actual", op.actual < 0 ? "not in the graph that ran" : deviceName(op.actual));
  line("shard", op.shard === null ? (D.sharded ? "none: it runs once" : "") : op.shard);
  line("stage", op.stage && op.stage + (op.backward ? ", backward" : ", forward"));
  line("outputs", op.outputs);
  line("bytes", op.output_bytes ? formatBytes(op.output_bytes) : "");
  line("FLOPs", op.flops !== null ? formatFlops(op.flops) : "");
  line("source", op.source);
  line("reads", links(inputs.get(item.op)));
  line("feeds", links(outputs.get(item.op)));
  for (const reason of [op.reason, op.unsharded_reason]) if (reason) element("div", reason, panel, "reason");
}

function links(others) {
  if (!others) return "";
  const box = element("div");
  others = [...new Map(others.map((other) => [other[0], other])).values()];
  for (const [op, control] of others.slice(0, 30)) {
    const a = element("a", D.ops[op].name, element("div", undefined, box), "op");
    if (control) element("span", " (waits)", a.parentNode, "dim");
    a.onclick = () => goTo(op);
  }
  if (others.length > 30) element("div", "\u2026 and " + (others.length - 30) + " more", box, "dim");
  return box;
}

function gather(numbers, nameOf) { // by name; those without one are left out
  const found = new Map();
  for (const i of numbers) {
    const name = nameOf(i);
    if (name && !found.has(name)) found.set(name, []);
    if (name) found.get(name).push(i);
  }
  return [...found];
}

function showMembers(ops, name, panel) { // each once, with a link to it on every device
  const found = gather(ops, pathOfOp);
  for (const [path, same] of found.slice(0, 60)) {
    const box = element("div", (D.ops[same[0]].variable || layerOf(path).split(name + "/").pop()) + " ", panel, "member");
    let last = "";
    for (const op of same) {
      const device = deviceName(D.ops[op].device), [kind] = device.match(/^.*?(?=\d*$)/);
      element("a", kind === last ? device.slice(kind.length) : device, box, "op").onclick = () => goTo(op);
      box.append(" ");
      last = kind;
    }
  }
  if (found.length > 60) element("div", "\u2026 and " + (found.length - 60) + " more", panel, "dim");
}

function findLayers(wanted) { // the outermost scopes with these words, else operations; each once, with all of its operations
  const upTo = (i) => {
    const path = pathOfOp(i), at = path.toLowerCase().indexOf(wanted);
    if (at < 0) return D.ops[i].type.toLowerCase() === wanted ? layerOf(path) : "";
    const end = path.indexOf("/", at + wanted.length);
    return layerOf(end < 0 ? path : path.slice(0, end));
  };
  const all = D.ops.map((_, i) => i), found = gather(all, upTo);
  const order = ([name, ops]) => (name.toLowerCase().split("/").pop() === wanted ? 0 : layerOf(pathOfOp(ops[0])) === name ? 2 : 1);
  if (found.length) return found.sort((a, b) => order(a) - order(b));
  return gather(all, (i) => (D.ops[i].name.toLowerCase().includes(wanted) ? D.ops[i].name : "")); // as TensorFlow calls it
}

function search(text) {
  const box = $("results"), wanted = text.trim().toLowerCase();
  box.textContent = "";
  box.hidden = !wanted;
  if (!wanted) return;
  const found = findLayers(wanted);
  for (const [name, ops] of found.slice(0, 60)) {
    const line = element("div", undefined, box), devices = devicesOf(ops), op = D.ops[ops[0]];
    for (const device of devices.slice(0, 8)) element("span", undefined, line, "dot").style.background = deviceColor(device);
    const at = name.lastIndexOf("/"), what = ops.length > devices.length ? ops.length + " ops" : op.type;
    element("span", name.slice(at + 1) + " ", line);
    element("small", what + " on " + devicesText(devices) + (at < 0 ? "" : ", in " + name.slice(0, at)), line);
    line.title = name;
    line.onclick = () => { box.hidden = true; goToLayer(name, ops); };
  }
  if (found.length > 60) element("div", found.length - 60 + " more; type on", box, "dim");
  if (!found.length) element("div", "Nothing found", box, "dim");
}

function alikeDevices() { // devices whose columns are alike, together
  const columns = (device) => D.lanes.filter((lane) => lane.device === device).map((lane) => lane.like).join();
  return gather(D.devices.map((_, device) => device), (device) => columns(device) || "only " + device).map(([, devices]) => devices);
}

function showDevice(devices, table) { // one, or several with what is the most of them
  const tr = element("tr", undefined, table), first = element("td", undefined, tr);
  tr.mark = element("span", "", first);
  element("span", undefined, first, "dot").style.background = deviceColor(devices[0]);
  element("span", devicesText(devices), first);
  const flops = (n) => formatFlops(n).replace("FLOPs", "");
  for (const [what, format] of [["ops", String], ["flops", flops], ["parameters", formatBytes], ["sent", formatBytes]]) {
    const texts = devices.map((device) => D.devices[device][what]).sort((a, b) => a - b).map(format), most = texts.pop();
    element("td", (texts.length && texts[0] !== most ? "\u2264 " : "") + most, tr);
  }
  return tr;
}

function showLegend() {
  const table = $("legend"), head = element("tr", undefined, table);
  for (const name of ["", "ops", "FLOPs", "params", "sent"]) element("th", name, head);
  for (const alike of alikeDevices()) {
    const row = showDevice(alike, table), members = alike.length > 1 ? alike.map((device) => showDevice([device], table)) : [];
    const show = (open) => { members.forEach((tr) => { tr.hidden = !open; }); row.mark.textContent = open ? "\u25be " : "\u25b8 "; };
    if (members.length) show(false);
    const title = "These devices do the same with rows of their own; click to see each";
    if (members.length) Object.assign(row, { className: "fold", title, onclick: () => show(members[0].hidden) });
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
  for (const { text, note } of D.moves) {
    const line = element("div", undefined, $("routes"), "route");
    element("div", text, line);
    element("small", note, line);
  }
  if (D.transfers.length) $("transfers-title").textContent = "The largest of " + D.transfers.length.toLocaleString("en") + " tensors";
  for (const { op, bytes, way, name } of D.largest) {
    const line = element("div", undefined, $("transfers"));
    element("b", formatBytes(bytes), line);
    element("i", way, line);
    element("span", "\u200e" + name, line);
    line.title = D.ops[op].name;
    line.onclick = () => goTo(op);
  }
}

function showLanes() {
  $("lanes").textContent = "";
  for (const lane of lanes) {
    const many = !$("shards").checked && lane.alike > 1, mark = lane.alike < 2 ? "" : many ? "\u25b8 " : "\u25be ";
    const what = mark + (many ? lane.together : lane.what);
    const box = element("div", what ? what + " " : lane.note, $("lanes"), "lane");
    if (what) element("small", many ? lane.notes : lane.note, box);
    box.title = box.textContent + (many ? "; shown is " + lane.what + " on " + lane.note + ". Click to see each" : "");
    if (lane.alike > 1) Object.assign(box, { className: "lane fold", onclick: () => $("shards").click() });
    Object.assign(box.style, { left: MARGIN / 2 + lane.index * (LANE + MARGIN) + "px", width: LANE + "px", borderColor: deviceColor(lane.device) });
  }
}

function start() {
  tree = buildTree();
  indexEdges();
  $("kind").textContent = `${D.ops.length.toLocaleString("en")} operations, ${D.actual ? "as they ran" : "as requested"}`;
  $("shards").parentNode.hidden = !D.lanes.some((lane) => lane.alike > 1);
  chooseLanes();
  openUntil(40);
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
  for (const box of ["all", "shards"]) $(box).addEventListener("change", layout);
  $("panel").onclick = () => { document.querySelector("aside").classList.toggle("open"); };
  $("less").onclick = () => { tree.lanes.forEach((lane) => everyGroup(lane.root, (g) => { g.open = false; })); layout(); };
  $("more").onclick = () => {
    allClosed().forEach((g) => { g.open = true; });
    layout();
  };
  document.body.dataset.firstViewMs = Math.round(performance.now());
}
start();
