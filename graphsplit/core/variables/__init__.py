"""Laid out variables: in parts or in copies, one on each device, while everybody else goes on using the variable.

What enters: a variable of TensorFlow or Keras and the devices of its parts. What leaves: the same variable, whose
value lies there, and functions that take values apart and put them together.
"""
