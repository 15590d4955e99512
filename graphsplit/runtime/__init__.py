"""From emitted graphs to functions that TensorFlow runs and differentiates."""
