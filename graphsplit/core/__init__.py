"""The ground: errors, devices, graph protos, layouts and sizes. Knows nothing of programs or plans."""
