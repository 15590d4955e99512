"""What users call on functions: options, signatures, `parallelize`, `on_device`, `verify`."""
