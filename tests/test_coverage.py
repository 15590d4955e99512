"""The coverage benchmark counts what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.coverage import applications, summarize
from benchmarks.coverage_models import MODELS

ROOT = Path(__file__).parent.parent


def test_counts_what_runs_at_home_and_what_follows_it():
    def step(x):
        return tf.reduce_sum(tf.sin(x)), tf.tanh(tf.raw_ops.Unique(x=x[:, 0]).y), tf.tanh(tf.cumsum(x))

    plan = gs.parallelize(step, devices=3).plan(tf.ones((7, 3)))
    found = summarize("", plan)
    assert 0 < found.sharded < found.carrying < found.ops
    assert 0 < found.sharded_bytes < found.carrying_bytes
    assert set(found.at_home) == {
        "1 x Unique: which entries are new depends on all rows",
        "1 x Cumsum: it needs all rows at once",
        "1 x Tanh: it follows one that runs on one device",  # (how many numbers are unique is not known when planning)
        "2 x Identity: it follows one that runs on one device",
    }


def test_everything_sharded():
    found = summarize("", gs.parallelize(lambda x: tf.tanh(x) * 2, devices=3).plan(tf.ones((7, 3))))
    assert found.sharded == found.carrying > 0
    assert found.sharded_bytes == found.carrying_bytes >= 2 * 7 * 3 * 4
    assert found.at_home == ()


def test_every_architecture_is_known():
    assert {"ResNet50", "NASNetLarge", "ConvNeXtXLarge", "EfficientNetV2L", "MobileNetV3Small"} <= set(applications())
    assert not set(applications()) & set(MODELS)


@pytest.mark.long
def test_command_line(tmp_path: Path):
    path, page = tmp_path / "coverage.json", tmp_path / "page.md"
    page.write_text("# Old\n\n## Others\n\nkept\n\n<!-- written by graphsplit -->\n")
    command = [sys.executable, "-m", "benchmarks.coverage", "--names", "Graph convolution, GAN, Distillation"]
    command += ["--output", str(path), "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["models"]
    assert [one["name"] for one in found] == ["Graph convolution", "GAN"]
    assert all(one["sharded"] == one["carrying"] > 0 for one in found)
    [program] = json.loads(path.read_text())["programs"]
    assert program["name"] == "Distillation"
    assert program["at_home"] == []
    assert 0.99 * program["flops"] < program["sharded_flops"] < program["flops"]
    assert "| Distillation |" in page.read_text()
    assert page.read_text().endswith("## Others\n\nkept\n<!-- written by graphsplit -->\n")
    assert "# Old" not in page.read_text()
    assert "100 %" in done.stdout
    wrong = subprocess.run([*command[:4], "Nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert wrong.returncode == 2
    assert "Nonsense" in wrong.stderr
