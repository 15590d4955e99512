"""The command line.

What enters: what users type. What leaves: text, pages and files; and exit codes.
"""

from graphsplit.cli.main import app

__all__ = ["app"]
