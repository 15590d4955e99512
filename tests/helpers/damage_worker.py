"""Run in a process of its own: damage files of a SavedModel again and again, and transpile what is left.

    python damage_worker.py MODEL FOLDER PART,PART SEED COUNT [--without-fingerprint]

prints one line of JSON for each time: where the damage is, and what came of it. "refused": an error of graphsplit;
"same": the transpiled model returns what TensorFlow itself computes from the same damaged files; "same failure":
neither of them runs; anything else is a defect.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

import graphsplit as gs

WORDS = ["good", "Bad bad", "a fine day", "x", "a", "good bad", "c"]


def request(function: Any) -> dict[str, tf.Tensor]:
    """Return seven rows for every argument."""
    found = {}
    for name, spec in function.structured_input_signature[1].items():
        shape = [7, *spec.shape[1:]]
        numbers = np.random.default_rng(0).standard_normal(shape)
        found[name] = tf.constant(WORDS) if spec.dtype == tf.string else tf.cast(tf.constant(numbers), spec.dtype)
    return found


def results(folder: str) -> Any:
    """Return what every signature of a model returns; the text of an error where it cannot be loaded or run."""
    try:
        signatures = tf.saved_model.load(folder).signatures
        return {key: {n: t.numpy() for n, t in f(**request(f)).items()} for key, f in sorted(signatures.items())}
    except Exception as error:  # of TensorFlow, about a file that is meant to be damaged
        return f"{type(error).__name__}: {error}"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, dict) or isinstance(b, dict) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.allclose(a, b, rtol=1e-5, equal_nan=True) if a.dtype.kind == "f" else np.array_equal(a, b))


def outcome(folder: Path, target: Path) -> str:
    try:
        gs.serving.transpile_saved_model(folder, target, 2)
    except gs.GraphsplitError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected, actual = results(str(folder)), results(str(target))
    if isinstance(expected, str):
        return "same failure" if isinstance(actual, str) else f"runs, and the original does not: {expected}"
    if isinstance(actual, str):
        return f"the original runs, and this does not: {actual}"
    return "same" if same(actual, expected) else "other results"


def main(model: str, folder: str, parts: str, seed: str, count: str, *options: str) -> None:
    rng = random.Random(int(seed))
    broken, target = Path(folder) / "broken", Path(folder) / "out"
    for part, turn in itertools.product(parts.split(","), range(int(count))):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(model, broken)
        if "--without-fingerprint" in options:
            (broken / "fingerprint.pb").unlink(missing_ok=True)
        [path] = [p for p in broken.rglob("*") if p.is_file() and part in (p.name, p.parent.name)]
        content = bytearray(path.read_bytes())
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        if turn % 4 == 3:
            del content[place:]
        else:
            content[place] ^= 1 << bit
        path.write_bytes(content)
        said = {"part": part, "turn": turn, "place": place, "bit": bit if turn % 4 != 3 else "cut"}
        print(f"doing {said}", file=sys.stderr, flush=True)
        print(json.dumps({**said, "result": outcome(broken, target)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
