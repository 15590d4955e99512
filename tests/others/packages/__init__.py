"""Models of other packages, tiny: each module has `REQUIREMENTS` for pip and `models()`, training steps by name."""
