"""Speed, memory and communication of graphsplit beside what people would use instead: `python -m benchmarks`."""
