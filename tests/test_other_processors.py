"""The law on other processors: what this one would compute with other kernels, vectors and contents of memory.

A bound that only holds for the kernels of one machine, and a result that nobody wrote, are found here on any machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Where numbers are compared most closely, or are of ops with outputs that are not defined.
FILES = {
    "rules": ["tests/test_rules.py", "-k", "sharded_equals or partial_sum"],
    "any batch": ["tests/test_unknown_batch.py", "tests/test_unknown_lengths.py"],
    "Keras": ["tests/test_keras_models.py", "tests/test_keras_models_tf_keras.py"],
    "training": ["tests/test_decompositions.py", "tests/test_mixed_precision.py", "tests/test_training.py"],
}
# (There oneDNN has no kernels of float16, on one device either.)
LEFT_OUT = {("training", "short vectors"): ["-k", "not mixed_float16 and not NHWC-1.0-dtype3"]}
SETTINGS = {
    "Eigen": {"TF_ENABLE_ONEDNN_OPTS": "0"},
    "short vectors": {"TF_ENABLE_ONEDNN_OPTS": "1", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("files", FILES)
def test_results_do_not_depend_on_the_processor(files: str, setting: str):
    # glibc fills what it hands out with the complement of this byte, and what is given back with the byte
    environment = {**os.environ, **SETTINGS[setting], "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES[files]]
    command += LEFT_OUT.get((files, setting), [])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
