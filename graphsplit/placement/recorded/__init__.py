"""What was recorded: where TensorFlow ran each operation, and when.

What enters: a call that is run once. What leaves: the actual placement, and the step as a timeline.
"""
