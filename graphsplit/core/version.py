"""The version of graphsplit."""

__version__ = "0.1.0"
