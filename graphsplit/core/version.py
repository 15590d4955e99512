"""The version of graphsplit."""

__version__ = "0.2.0"
