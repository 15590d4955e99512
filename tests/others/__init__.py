"""Other people's tests and models as our oracle: `python -m tests.others keras` and `python -m tests.others models`.

In goes what is installed and knows nothing of graphsplit: the tests in Keras' wheel, models of other packages. Out come
counts: how many of their calls gave the same numbers on several devices, how many did not, and how many were sharded.
"""
