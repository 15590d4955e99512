"""`python -m graphsplit`: the command line, where `graphsplit` is not on the path."""

from graphsplit.cli import app

if __name__ == "__main__":
    app()
