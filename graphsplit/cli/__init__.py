"""The command line."""

from graphsplit.cli.main import app

__all__ = ["app"]
