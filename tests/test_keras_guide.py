"""The guide for Keras users: its code, run from top to bottom in a fresh process."""

import os
import re
from pathlib import Path

from tests.helpers.processes import python

ROOT = Path(__file__).parent.parent


def test_the_guide_runs(tmp_path):
    text = (ROOT / "docs" / "from_one_gpu_to_eight.md").read_text()
    (tmp_path / "guide.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    process = python("guide.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.returncode == 0, process.stderr[-3000:]
    assert "4 shards" in process.stdout
    assert (tmp_path / "model.keras").exists()
