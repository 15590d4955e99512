"""From emitted graphs to functions that TensorFlow runs and differentiates.

What enters: a trace and a plan. What leaves: a function of flat tensors, and the gradients that tapes ask for.
"""
