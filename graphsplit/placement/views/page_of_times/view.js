"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 170, ROW = 22, tip = document.getElementById("tip");
let from = 0, to = data.seconds || 1;
const ink = getComputedStyle(document.body).color;
if (!data.memory.length) for (const id of ["alive", "memory"]) document.getElementById(id).hidden = true;

function prepare(canvas, height) {
  const width = document.body.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  return [pen, width];
}

const place = (s, width) => LEFT + ((s - from) / (to - from)) * (width - LEFT - 10);

function draw() {
  const [pen, width] = prepare(document.getElementById("time"), data.places.length * ROW + 24);
  for (const [place_, type, a, b] of data.events) {
    if (b < from || a > to) continue;
    pen.fillStyle = data.colors[place_];
    const x = Math.max(place(a, width), LEFT);
    const wide = Math.max(place(b, width) - x, 0.6);
    pen.fillRect(x, place_ * ROW + 3, wide, ROW - 6);
    label(pen, data.types[type], x, wide, place_ * ROW + 15);
  }
  pen.fillStyle = ink;
  data.places.forEach((name, row) => pen.fillText(name, 4, row * ROW + 15));
  for (let k = 0; k <= 5; k++) {
    const s = from + ((to - from) * k) / 5;
    pen.fillText((s * 1e3).toPrecision(4) + " ms", Math.min(place(s, width), width - 62), data.places.length * ROW + 16);
  }
  drawMemory();
}

function label(pen, text, x, wide, y) { // what a bar is, where there is room for it
  if (wide < 24 || pen.measureText(text).width > wide - 6) return;
  pen.fillStyle = "#fff";
  pen.fillText(text, x + 3, y);
}

function drawMemory() {
  if (!data.memory.length) return;
  const [pen, width] = prepare(document.getElementById("memory"), data.memory.length * 46 + 6);
  const most = Math.max(1, ...data.memory.flatMap((m) => m.steps.map((step) => step[1])));
  data.memory.forEach((memory, row) => {
    const base = row * 46 + 44;
    pen.fillStyle = memory.color;
    memory.steps.forEach(([s, count], i) => {
      const end = i + 1 < memory.steps.length ? memory.steps[i + 1][0] : data.seconds;
      if (end < from || s > to) return;
      const x = Math.max(place(s, width), LEFT), height = (count / most) * 40;
      pen.fillRect(x, base - height, Math.max(place(Math.min(end, to), width) - x, 0.5), height);
    });
    pen.fillStyle = ink;
    pen.fillText(memory.name + "  " + (memory.most / 1e6).toFixed(1) + " MB", 4, base - 14);
  });
}

const canvas = document.getElementById("time");
const at = (event) => from + ((event.offsetX - LEFT) / (document.body.clientWidth - LEFT - 10)) * (to - from);
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const middle = at(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
  from = Math.max(0, middle - (middle - from) * factor);
  to = Math.min(data.seconds, middle + (to - middle) * factor);
  draw();
}, { passive: false });
let held = null;
canvas.addEventListener("mousedown", (event) => { held = at(event); });
window.addEventListener("mouseup", () => { held = null; });
canvas.addEventListener("dblclick", () => { from = 0; to = data.seconds; draw(); });
canvas.addEventListener("mousemove", (event) => {
  if (held !== null) {
    const by = Math.max(-from, Math.min(held - at(event), data.seconds - to));
    from += by;
    to += by;
    draw();
  }
  const row = Math.floor(event.offsetY / ROW), s = at(event);
  const found = data.events.find(([place_, , a, b]) => place_ === row && a <= s && s <= b);
  tip.style.display = found ? "block" : "none";
  if (!found) return;
  const [, type, a, b, name, bytes] = found;
  tip.textContent = `${data.types[type]} ${name}  ${((b - a) * 1e6).toFixed(1)} us` + (bytes ? `, ${(bytes / 1e6).toFixed(3)} MB` : "");
  tip.style.left = Math.min(event.clientX + 12, window.innerWidth - 420) + "px";
  tip.style.top = event.clientY + 14 + "px";
});
canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
window.addEventListener("resize", draw);
draw();
