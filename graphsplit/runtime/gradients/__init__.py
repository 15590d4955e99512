"""Gradients from outside: a function under the user's own tape.

What enters: a traced function and its emitted graph, gradients included. What leaves: a forward part, backward parts
that run when gradients come in, and what is kept between.
"""
