"""From a Python callable, or a finished graph, to a program."""
