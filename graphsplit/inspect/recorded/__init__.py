"""What was recorded: when TensorFlow ran each operation.

What enters: a call that is run once. What leaves: the step as a timeline.
"""
