"""What a project that uses graphsplit tests with."""
