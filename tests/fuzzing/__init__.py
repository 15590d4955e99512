"""The fuzzer of the law: random programs, on several devices and on one.

A program is Python source: lines `v3 = tf.raw_ops.MatMul(a=v1, b=x0)` in a function, made one by one from templates
(`catalog`) whose holes are filled with what is in scope (`holes`, `generator`). What fails is made small (`shrinker`)
and printed as it ran. `python -m tests.fuzzing --help` says how to start it.
"""
