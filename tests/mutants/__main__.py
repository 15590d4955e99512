"""`python -m tests.mutants [NUMBER ...]`: make each mistake in a copy of the package, and see that a test finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.processes import python
from tests.mutants.table import ROOT, Mutant, mutants


def main() -> int:
    """Print a line for each mistake; return 1 if no test finds one."""
    wanted = set(map(int, sys.argv[1:]))
    left = []
    for number, mutant in enumerate(mutants(), 1):
        if wanted and number not in wanted:
            continue
        found_by = finder_of(mutant)
        print(f"{number:3} {mutant.file}: {found_by or 'NOT FOUND: ' + mutant.after.strip()}", flush=True)
        left += [number] * (not found_by)
    print(f"{len(left)} are not found" if left else "all are found")
    return bool(left)


def finder_of(mutant: Mutant) -> str:
    """Return the first test that fails with a mistake; "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in ROOT.iterdir():
            if path.name not in (".git", ".pytest_cache", "graphsplit"):
                (copy / path.name).symlink_to(path)
        shutil.copytree(ROOT / "graphsplit", copy / "graphsplit", ignore=shutil.ignore_patterns("__pycache__"))
        mutant.make_in(copy / "graphsplit")
        files, _, chosen = mutant.tests.partition(" -k ")
        call = ["-m", "pytest", *files.split(), "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb", "no"]
        call += ["-k", chosen] if chosen else []
        try:
            done = python(
                *call,
                cwd=copy,
                env={**os.environ, "PYTHONPATH": folder, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"},
                timeout=1200,
            )
        except subprocess.TimeoutExpired:
            return "a test that does not end"
        if done.returncode == 0:
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}: {done.stdout[-500:]}"


if __name__ == "__main__":
    sys.exit(main())
