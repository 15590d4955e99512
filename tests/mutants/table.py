"""Mistakes that tests must find, as data: see `mutants.toml`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Mutant:
    """A mistake: a piece of a file that stands there once, what replaces it, and arguments of pytest."""

    file: str
    before: str
    after: str
    tests: str

    def make_in(self, package: Path) -> None:
        """Make it in a copy of the package."""
        path = package / self.file
        source = path.read_text(encoding="utf-8")
        assert source.count(self.before) == 1, f"{self.file} has {source.count(self.before)} times {self.before!r}"
        path.write_text(source.replace(self.before, self.after), encoding="utf-8")


def mutants() -> list[Mutant]:
    """Return all of them."""
    text = Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8")
    return [Mutant(**entry) for entry in tomllib.loads(text)["mutant"]]
