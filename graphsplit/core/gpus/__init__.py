"""GPUs.

What enters: an operation, or the GPUs of this machine. What leaves: for which kinds of device TensorFlow has a kernel,
several logical devices for each GPU, and what NVIDIA's driver says.
"""
