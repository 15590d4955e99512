"""Protos of graphs: read, written and marked.

What enters: `NodeDef`s, `FunctionDef`s, and references between them. What leaves: new ones. Nothing here knows devices
or layouts.
"""
