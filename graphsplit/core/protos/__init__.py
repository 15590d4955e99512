"""Protos of graphs: read, written and marked. Nothing here knows of devices or layouts."""
