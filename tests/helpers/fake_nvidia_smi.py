"""An `nvidia-smi` that answers what a test wants, first on the PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

# As https://docs.nvidia.com/deploy/nvidia-smi describes them: the header of the table of peers is underlined.
TWO_PEERS = (
    " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n\nLegend:\n\n  X    = Self\n"
    "  OK   = Status Ok\n  CNS  = Chipset not supported\n"
)
ONE_PEER = " \t\x1b[4mGPU0\t\x1b[0m\n GPU0\tX\t\n\nLegend:\n\n  X    = Self\n"


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: str = "", peers: str = "", status: int = 0, seconds: int = 0
) -> None:
    """Make `nvidia-smi` print `gpus` when asked for GPUs, `peers` when asked for the topology."""
    (folder / "gpus").write_text(gpus)
    (folder / "peers").write_text(peers)
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\n[ {seconds} = 0 ] || exec sleep {seconds}\n"
        f'case "$1" in topo) cat "{folder}/peers";; *) cat "{folder}/gpus";; esac\nexit {status}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def remove(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make sure that there is no `nvidia-smi`."""
    monkeypatch.setenv("PATH", str(folder))
