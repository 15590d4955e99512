"""Layouts as users ask for them: of variables, slots and tensors, along the axes of a mesh."""
