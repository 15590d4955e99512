"""A program, and how its variables lie along an axis of a mesh -> a program whose operations stand in columns."""
