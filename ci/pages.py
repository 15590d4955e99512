"""`python ci/pages.py` runs the code of all pages, and writes what each block prints into the page that shows it.

`python ci/pages.py prediction.md README.md` does so for some. It names the pages that it changed, and the lines that a
page shows and that nothing like was printed: those are edited by hand, as is the text around.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers.pages import ROOT, path_of, run, runs, written

PAGES = ["README.md", *sorted([page.name for page in (ROOT / "docs").glob("*.md")])]


def renew(name: str) -> str:
    """Write a page anew; return what there is to say of it."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run(name, Path(folder))
    before = path_of(name).read_text()
    text, missing = written(before, printed, name)
    changed = text != before
    if changed:
        path_of(name).write_text(text)
    lost = [f"  not printed: {line}" for line in missing]
    return "\n".join([f"{name}: {'changed' if changed else 'as it was'}", *lost])


def main() -> None:
    """Write the pages."""
    names = [name for name in sys.argv[1:] or PAGES if runs(name)]
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2)))) as pool:
        for said in pool.map(renew, names):
            print(said, flush=True)


if __name__ == "__main__":
    main()
