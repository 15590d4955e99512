"""GPUs: what TensorFlow has kernels for, several logical devices out of one GPU, and what the driver says."""
