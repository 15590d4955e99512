"""The command `worker`: options, and checks before TensorFlow starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from graphsplit.clusters.addresses import check_port


def add_command(app: typer.Typer, run: Callable[..., None]) -> None:
    """Add the command to an app.

    Args:
      app: of the command line.
      run: checks, starts TensorFlow, acts; see `main`.
    """

    @app.command()
    def worker(
        port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where clients connect.")] = 2222,
        devices: Annotated[int | None, typer.Option("--devices", min=1, help="How many logical CPU devices.")] = None,
        threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of an operation on the CPU.")] = None,
        insecure: Annotated[
            bool, typer.Option("--insecure", help="This machine has a public address, and the port is closed to it.")
        ] = False,
    ) -> None:
        """Let other machines use this one's devices, until it is ended. They connect with graphsplit.connect."""

        def serve() -> None:
            from graphsplit.clusters.worker import serve as run_server

            run_server(port, devices, threads)

        run(serve, lambda: check_port(port, insecure), False)
