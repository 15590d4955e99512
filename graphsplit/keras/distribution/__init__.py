"""`keras.distribution` on TensorFlow: a distribution comes in, Keras' own calls on all its devices go out."""
