"""`python ci/emitted_graphs.py` writes `tests/emitted_graphs.txt`: digests of the graphs that are emitted for programs.

A commit that changes lines of it says why these graphs are others now. One that moves or renames changes none.
"""

from __future__ import annotations

from logical_devices import start


def main() -> None:
    """Write the file."""
    start()
    from tests.helpers import emitted_graphs  # makes tensors

    emitted_graphs.FILE.write_text(emitted_graphs.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
