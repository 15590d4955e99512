"""The version of graphsplit."""

__version__ = "1.0.0rc1"
