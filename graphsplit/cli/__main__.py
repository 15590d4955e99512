"""`python -m graphsplit.cli`."""

from graphsplit.cli import app

if __name__ == "__main__":
    app()
