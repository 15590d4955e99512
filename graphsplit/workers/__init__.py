"""Several machines: workers, connecting to them, whether they are alive, and calls that end although one is not."""
