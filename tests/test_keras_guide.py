"""The guide for Keras users: its code, run from top to bottom in a fresh process."""

import os
import re
from pathlib import Path

import keras
import numpy as np

import graphsplit as gs
from tests.helpers.processes import python

ROOT = Path(__file__).parent.parent


def test_resuming_as_the_guide_says_is_exact(tmp_path, monkeypatch):
    """Its three lines carry the numbers of dropout from one process to the next, as no file of Keras does."""
    text = (ROOT / "docs" / "from_one_gpu_to_eight.md").read_text()
    states, save, load = re.search(r"```python\n(states = .*?\n)(np.savez.*?\n)(_ = .*?)\n```", text).groups()
    names = {"np": np}
    exec(states, names)

    def fit(model, epochs):
        model = gs.multi_gpu_model(model, gpus=2)
        model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
        return model

    def start():
        keras.utils.set_random_seed(0)
        net = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *net])
        model.compile("adam", "mse")
        return model

    x, y = np.random.default_rng(0).normal(size=(9, 3)), np.ones((9, 1))
    expected = fit(start(), 2).get_weights()
    model, exact = fit(start(), 1), {}
    monkeypatch.chdir(tmp_path)
    model.save("model.keras")
    exec(save, {**names, "model": model})
    for lines in ("", load):
        again = keras.models.load_model("model.keras")
        exec(lines, {**names, "model": again})
        pairs = zip(fit(again, 1).get_weights(), expected, strict=True)
        exact[lines] = all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
    assert exact == {"": False, load: True}


def test_the_guide_runs(tmp_path):
    text = (ROOT / "docs" / "from_one_gpu_to_eight.md").read_text()
    (tmp_path / "guide.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    process = python("guide.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.returncode == 0, process.stderr[-3000:]
    assert "4 shards" in process.stdout
    assert (tmp_path / "model.keras").exists()
