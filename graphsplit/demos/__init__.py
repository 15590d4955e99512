"""What `graphsplit demo` runs."""
