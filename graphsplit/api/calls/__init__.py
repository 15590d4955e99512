"""A call of a parallelized function.

What enters: a function, its options and arguments. What leaves: its results, from a plan that is made once for each
signature.
"""
