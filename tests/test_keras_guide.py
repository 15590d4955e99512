"""The guide for Keras users: its code, run from top to bottom in a fresh process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_guide_runs(tmp_path):
    text = (ROOT / "docs" / "from_one_gpu_to_eight.md").read_text()
    (tmp_path / "guide.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "guide.py"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "4 shards" in process.stdout
    assert (tmp_path / "model.keras").exists()
