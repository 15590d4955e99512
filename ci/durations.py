"""`python ci/durations.py` records in `tests/durations.txt` how much of a processor each test takes.

What follows goes to pytest: `python ci/durations.py -m "not gpu"` runs all, also what is long, which takes hours; with
a file, or `-k`, only lines of what runs change. It says which tests become long, and which are no longer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def main() -> int:
    """Run tests, and write the file."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    return pytest.main(["-p", "tests.helpers.durations", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
