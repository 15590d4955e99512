"""Files and pictures of placements, and the page in a real browser."""

from __future__ import annotations

import csv
import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.storage import forms
from graphsplit.inspect import Edge, PlacedOp, Placement, placement_of_graph
from graphsplit.inspect.graph import reading_order
from graphsplit.inspect.records import Transfer
from graphsplit.inspect.views.pages import page_data, page_html
from graphsplit.inspect.views.pictures import picture
from graphsplit.inspect.views.summaries import summarize
from tests.helpers.messages import raises
from tests.helpers.placements import synthetic, two_device_graph

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


@pytest.fixture
def two_devices():
    return placement_of_graph(two_device_graph(), title="a <graph>")


def test_json(two_devices, tmp_path):
    two_devices.save(tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    assert {op["name"]: op["device"] for op in content["ops"]}["product"] == "/device:CPU:1"
    assert content["transfers"][0]["bytes"] == 512
    assert len(content["edges"]) == 7


def test_networkx_writes_what_other_programs_read(two_devices, tmp_path):
    nx.write_gml(two_devices.graph, tmp_path / "p.gml", stringizer=str)
    graph = nx.read_gml(tmp_path / "p.gml")
    assert graph.nodes["product"]["flops"] == 1024
    assert graph.number_of_edges() == 7


def test_graph_def(two_devices, tmp_path):
    two_devices.save(tmp_path / "p.pb")
    graph = tf.compat.v1.GraphDef.FromString((tmp_path / "p.pb").read_bytes())
    devices = {node.name: node.device for node in graph.node}
    assert devices["relu"] == "/device:CPU:0"
    assert list(graph.node[2].input) == ["x", "w"]
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(graph)


def test_event_file(two_devices, tmp_path):
    two_devices.save(tmp_path / "events")
    [file] = (tmp_path / "events").iterdir()
    events = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(file))]
    graph = tf.compat.v1.GraphDef.FromString(events[1].graph_def)
    assert {node.device for node in graph.node} == {"/device:CPU:0", "/device:CPU:1"}


def test_a_picture(two_devices, tmp_path):
    two_devices.save(tmp_path / "p.svg")
    texts = [text.text for text in ElementTree.parse(tmp_path / "p.svg").getroot() if text.tag.endswith("text")]
    assert texts[0] == "Placement of a <graph>"
    assert texts[2:4] == ["CPU:0", "CPU:1"]
    assert "512 B" in texts
    assert "product" in texts


@pytest.mark.parametrize("suffix", [".bmp", ".dot", ".graphml", ".png"])
def test_unknown_suffix(two_devices, suffix):
    with pytest.raises(
        gs.errors.ArgumentError, match=rf"^'p{suffix}': a placement is not written as '{suffix}'. There are"
    ):
        two_devices.save(f"p{suffix}")


def test_summary_of_many_ops_stays_small():
    summary = summarize(synthetic(2002, shards=4), most=40)
    (once, shards), boxes = summary.lanes, summary.lanes.values()
    assert (once.title, shards.title, shards.note([8] * 4)) == (
        "runs once",
        "shards 0 to 3 \u00d7 4",
        "GPU:0 to 3, 8 rows each",
    )
    assert [sum(box.ops for box in lane) for lane in boxes] == [2, 500]
    assert [box.label for box in summary.lanes[once]] == ["x", "loss"]
    assert [box.label for box in summary.lanes[shards]][3:5] == ["block_3", "block_4"]
    assert max(map(len, boxes)) <= 40
    assert {(flow.bytes, flow.times) for flow in summary.flows if flow.crosses} == {(8192, 3), (1024, 3)}


def test_summary_gathers_what_is_alike():
    ops = [PlacedOp(f"AddN_{i}" if i else "AddN", "AddN", "/device:CPU:0") for i in range(300)]
    [[box]] = summarize(Placement(ops, [])).lanes.values()
    assert (box.label, box.ops) == ("AddN", 300)


def test_a_layer_is_as_fine_backward_as_forward_and_what_is_little_stays_whole():
    names = [f"net/conv{k}_block{b}_{part}/Conv2D" for k in (2, 3) for b in (1, 2, 3) for part in ("conv", "bn")]
    names += ["net/conv2d/Conv2D", "net/conv2d_1/Conv2D", *(f"loss/part_{i}" for i in range(5))]
    ops = [
        PlacedOp(scope + name, "Conv2D", "/device:CPU:0", flops=1000 if "net" in name else 0)
        for scope in ("", "gradient_tape/")
        for name in names
    ]
    for most, found in (
        (18, [f"net/conv{k}_block{b}" for k in (2, 3) for b in (1, 2, 3)]),
        (12, ["net/conv2", "net/conv3"]),
    ):
        [boxes] = summarize(Placement(ops, []), most).lanes.values()
        forward = [*found, "net/conv2d", "net/conv2d_1", "loss"]
        assert [box.label for box in boxes] == [*forward, *(f"gradient_tape/{label}" for label in forward)]


def test_lines_of_a_picture_pass_between_boxes():
    ops = [PlacedOp(f"part_{d}/op{i}", "Relu", f"/device:CPU:{d}", flops=1) for d in range(4) for i in range(5)]
    ways = [(a, b, i, i + 1) for a in range(4) for b in range(4) for i in range(4) if a != b]
    text = picture(Placement(ops, [Edge(f"part_{a}/op{i}", f"part_{b}/op{j}", 0, 8, "float32") for a, b, i, j in ways]))
    boxes = [
        list(map(float, found)) for found in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\d+)" height="44"', text)
    ]
    lines = [points_of(line) for line in re.findall(r'd="(M[^"]* C[^"]*)"', text)]
    assert len(lines) == len(ways)
    assert len(boxes) > 10
    for x, y in itertools.chain(*lines):
        assert not [box for box in boxes if box[0] + 1 < x < box[0] + box[2] - 1 and box[1] < y < box[1] + 44]


@pytest.mark.parametrize("shards", [2, 8])
def test_a_picture_draws_one_of_the_alike_shards_and_fits_a_page(shards: int):
    text = picture(synthetic(802, shards=shards))
    assert int(re.search(r'width="(\d+)"', text)[1]) <= 900
    texts = [html.unescape(found) for found in re.findall(r">([^<]+)</text>", text)]
    assert f"shards 0 to {shards - 1} \u00d7 {shards}" in texts
    assert "one of n alike is drawn" in texts[1]
    assert ("8.2 kB \u00d7 7" if shards == 8 else "8.2 kB") in texts
    assert not [size for size in re.findall(r'font-size="([\d.]+)"', text) if float(size) < 10]


def points_of(path: str) -> list[tuple[float, float]]:
    """Return points on the curves and straight lines of a path of an SVG."""
    found, at = [], np.array([0.0, 0.0])
    for command, numbers in re.findall(r"([MCH])([^MCH]*)", path):
        values = [float(number) for number in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", numbers)]
        ends = np.array([values[0], at[1]]) if command == "H" else np.array(values[-2:])
        bends = np.array(values[:4]).reshape(2, 2) if command == "C" else np.array([at, ends])
        t = np.linspace(0, 1, 20)[:, None] if command != "M" else np.array([[1.0]])
        curve = (1 - t) ** 3 * at + 3 * t * (1 - t) ** 2 * bends[0] + 3 * t**2 * (1 - t) * bends[1] + t**3 * ends
        found += [tuple(point) for point in curve]
        at = ends
    return found


def test_page_needs_no_network(two_devices, tmp_path):
    two_devices.save(tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "{{" not in text
    assert "a &lt;graph&gt;" in text
    assert "<iframe" in two_devices._repr_html_()


def test_page_data_is_complete(two_devices):
    data = page_data(two_devices)
    assert [op["name"] for op in data["ops"]] == reading_order(two_devices.graph)
    assert len(data["edges"]) == 3 * 7
    assert [device["name"] for device in data["devices"]] == ["CPU:0", "CPU:1"]


def test_constants_stand_before_their_readers():
    assert reading_order(placement_of_graph(two_device_graph()).graph)[:3] == ["x", "w", "product"]


PROBE = """
<script>
const report = { errors: [] };
window.addEventListener("error", (event) => report.errors.push(event.message));
const rowsNow = () => [...document.querySelectorAll(".row")].map((g) => g.querySelector("text").textContent);
const click = (element) => element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const aside = document.querySelector("aside"), seen = (element) => getComputedStyle(element).display !== "none";
report.lanes = [...document.querySelectorAll(".lane")].map((lane) => lane.textContent);
report.fits = svg.getBoundingClientRect().width <= document.getElementById("canvas").clientWidth;
report.legend = document.querySelectorAll("#legend tr").length;
report.signs = document.querySelectorAll("#signs svg").length;
report.toolbar = document.querySelector("header").getBoundingClientRect().height;
const boxes = [...document.querySelectorAll(".row .box")].map((box) => box.getBoundingClientRect());
const inside = (p) => boxes.some((b) => p.x > b.left + 1 && p.x < b.right - 1 && p.y > b.top + 1 && p.y < b.bottom - 1);
const pointsOf = (path) => [...Array(40)].map((_, k) => path.getPointAtLength((path.getTotalLength() * k) / 39));
document.getElementById("shards").click(); // five lanes: what goes from the first to the last passes three
const here = svg.getBoundingClientRect();
boxes.splice(0, boxes.length, ...[...document.querySelectorAll(".row .box")].map((box) => box.getBoundingClientRect()));
report.through = [...document.querySelectorAll("path.arrow")].filter((path) => path.getAttribute("d").includes("C") &&
  pointsOf(path).some((p) => inside({ x: p.x + here.left, y: p.y + here.top }))).length;
document.getElementById("shards").click();
report.arrows = document.querySelectorAll(".arrow").length;
report.labels = [...document.querySelectorAll(".bytes")].map((t) => t.textContent);
report.routes = [...document.querySelectorAll(".route div")].map((t) => t.textContent);
report.ways = [...document.querySelectorAll("#transfers i")].map((t) => t.textContent);
report.panel = [seen(aside)];
document.getElementById("panel").click();
report.panel.push(seen(aside));
document.getElementById("panel").click();
report.panel.push(seen(aside));
report.ink = getComputedStyle(document.body).color;
document.getElementById("less").click();
report.collapsed = rows.length; // drawn or not
const closed = [...document.querySelectorAll(".row")].find((g) => g.item.children);
click(closed.querySelector(".box"));
report.expanded = rows.length;
document.getElementById("shards").click();
report.allLanes = document.querySelectorAll(".lane").length;
report.allFit = svg.getBoundingClientRect().width <= document.getElementById("canvas").clientWidth;
document.getElementById("shards").click();
const box = document.getElementById("search");
const look = (text) => {
  box.value = text;
  box.dispatchEvent(new Event("input"));
  return [...document.querySelectorAll("#results > div")].map((line) => line.textContent);
};
report.layers = [look("block_1").slice(0, 2), look("BLOCK_1/LAYER_3").slice(0, 1), look("block_1/layer_3/").length];
report.layers.push(look("loss"), look("nobody"));
look("block_1/layer_3");
click(document.querySelector("#results div"));
const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent.trim());
report.layer = texts("#details h3, #details .member").slice(0, 2);
report.row = texts(".row.on text");
click([...document.querySelectorAll("#details .member a")][2]);
report.shard = document.querySelector("#details h3").textContent;
report.unfolded = document.querySelectorAll(".lane").length;
click(document.querySelectorAll(".lane")[1]); // folds what is alike
report.folded = document.querySelectorAll(".lane").length;
canvas.scrollTop = 0;
draw();
click([...document.querySelectorAll(".row")].find((g) => !g.item.children).querySelector(".box")); // it has links
const drawn = [...svg.querySelectorAll(".arrow, .link, .bytes")].map((element) => element.classList[0]);
report.order = drawn.filter((name, i) => name !== drawn[i - 1]);
report.found = look("shard_2/block_1/layer_3/op_0").length;
click(document.querySelector("#results div"));
report.details = document.getElementById("details").textContent;
report.devices = texts("#legend tr:not([hidden]) td:first-child");
document.querySelector("#legend .fold").click();
report.devices.push(document.querySelectorAll("#legend tr:not([hidden])").length);
report.selected = document.querySelectorAll(".row.on").length;
const other = [...document.querySelectorAll(".row")].find((g) => !g.item.children && !g.classList.contains("on"));
click(other.querySelector(".box"));
report.clicked = document.querySelector("#details h3").textContent === D.ops[other.item.op].name;
document.getElementById("more").click();
document.getElementById("canvas").scrollTop = 1e5;
report.drawn = document.querySelectorAll(".row").length;
document.body.appendChild(document.createElement("pre")).textContent = "REPORT" + JSON.stringify(report) + "END";
</script>
"""


@pytest.mark.browser
@pytest.mark.skipif(not BROWSER, reason="no chromium binary on this machine")
@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (1400, "dark"), (800, "light"), (800, "dark")])
def test_page_in_a_browser_with_twenty_thousand_ops(tmp_path, width, scheme):
    page = tmp_path / "p.html"
    synthetic(20_002).save(page)
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--window-size={width},1000", f"--user-data-dir={tmp_path}/profile"]
    command += ["--blink-settings=preferredColorScheme=" + ("0" if scheme == "dark" else "1"), page.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "CONSOLE" not in ran.stderr, ran.stderr
    report = json.loads(html.unescape(re.search("<pre>REPORT(.*?)END</pre>", ran.stdout, re.DOTALL)[1]))
    assert report["errors"] == []
    assert report["lanes"] == ["runs once GPU:0", "\u25b8 shards 0 to 3 \u00d7 4 GPU:0 to 3, 8 rows each"]
    assert report["fits"]
    assert report["legend"] == 6
    assert report["signs"] == 7
    assert report["through"] == 0  # no curve ends at a box that it only passes
    assert width <= 1000 or report["toolbar"] < 60  # one line
    assert report["arrows"] > 0
    assert "broadcast 8.2 kB \u00d7 3" in report["labels"]
    assert report["routes"] == ["broadcast: 3 tensors, 24.6 kB", "values: 3 tensors, 3.1 kB"]
    assert "GPU:0 → 3 devices" in report["ways"]
    assert report["panel"] == ([False, True, False] if width <= 1000 else [True, True, True])
    assert (report["ink"] == "rgb(230, 237, 243)") == (scheme == "dark")
    assert report["expanded"] > report["collapsed"] > 0
    assert (report["allLanes"], report["allFit"]) == (5, True)
    assert report["layers"] == [
        ["block_1 400 ops on GPU:0 to 3", "block_10 400 ops on GPU:0 to 3"],
        ["layer_3 40 ops on GPU:0 to 3, in block_1"],
        10,
        ["loss AddN on GPU:0"],
        ["Nothing found"],
    ]
    assert report["layer"] == ["block_1/layer_3", "op_0 GPU:0 1 2 3"]
    assert report["row"] == ["\u25b8 layer_3", "10 ops \u00b7 20 kFLOPs"]
    assert report["shard"] == "shard_2/block_1/layer_3/op_0"
    assert (report["unfolded"], report["folded"]) == (5, 2)
    assert report["order"] == ["link", "arrow", "bytes"]  # no line is drawn over a label
    assert report["devices"] == ["GPU:0", "\u25b8 GPU:1 to 3", 6]
    assert report["found"] == 1
    assert report["selected"] == 1
    assert report["clicked"]
    assert "MatMul" in report["details"]
    assert "GPU:2" in report["details"]
    assert 0 < report["drawn"] < 2000


@pytest.mark.parametrize("name", ["<!--<script>", "</script><script>alert(1)</script>", "{{data}}"])
def test_names_cannot_end_the_script_that_holds_them(name: str):
    def step(x):
        return tf.tanh(x) * 2

    step.__name__ = name
    page = page_html(gs.parallelize(step, devices=2).placement(tf.ones((4, 3))))
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert "<" not in data
    assert name in json.dumps(json.loads(data), ensure_ascii=False)
    assert f"<title>Placement of {html.escape(name)}</title>" in page


def test_a_table_of_operations(tmp_path: Path):
    weight = tf.Variable(tf.ones((4, 3)), name="weight")

    def step(x):
        with tf.name_scope("layer"):
            return tf.tanh(x @ weight)

    placed = gs.parallelize(step, devices=2).placement(tf.ones((5, 4)))
    placed.save(str(tmp_path / "ops.csv"))
    rows = list(csv.DictReader((tmp_path / "ops.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == list(placed.ops)
    columns = ("device", "asked device", "shard", "layer", "bytes", "FLOPs")
    found = [tuple(row[column] for column in columns) for row in rows if row["type"] == "MatMul"]
    assert found == [("CPU:0", "", "0", "layer", "36", "72"), ("CPU:1", "", "1", "layer", "24", "48")]


def test_a_table_of_transfers(tmp_path: Path):
    weight = tf.Variable(tf.ones((4, 3)), name="weight")
    placed = gs.parallelize(lambda x: tf.tanh(x @ weight), devices=3).placement(tf.ones((5, 4)))
    path = tmp_path / "transfers.csv"
    placed.transfers.save(path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    columns = [field.name for field in dataclasses.fields(Transfer)]
    assert list(rows[0]) == [*columns, forms.MARK]
    assert [tuple(row[column] for column in columns) for row in rows] == [
        (t.source, str(t.output), t.source_device, t.target_device, str(t.bytes), " ".join(t.readers))
        for t in placed.transfers
    ]
    assert sum(int(row["bytes"]) for row in rows) == sum(totals.sent_bytes for totals in placed.devices.values()) > 0
    assert [dataclasses.asdict(t)["bytes"] for t in placed.transfers] == [t.bytes for t in placed.transfers]
    placed.transfers.save(path)  # (its own file is written again, another one never)
    with raises(gs.errors.ArgumentError, "'transfers.xlsx': transfers are written as .csv."):
        placed.transfers.save("transfers.xlsx")
    path.write_text("mine")
    with pytest.raises(gs.errors.StorageError, match=r"transfers\.csv' was not written by graphsplit"):
        placed.transfers.save(path)
    assert path.read_text() == "mine"
