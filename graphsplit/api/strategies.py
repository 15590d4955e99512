"""What to say where `tf.distribute` has split the work already."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.core.structures import Branch, CompositeLeaf, StaticLeaf, Tree


def check_no_replica(name: str) -> None:
    """Raise `UnsupportedError` if a function is called by each of a strategy's replicas, inside of `strategy.run`."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        if replicas > 1:
            kind = type(tf.distribute.get_strategy()).__name__
            raise UnsupportedError(
                f"{name} is called in {kind}.run, by each of {replicas} replicas with rows of its own, and would split "
                "these once more. A parallelized function takes the strategy's place: call it outside of strategy.run "
                "and of strategy.scope(), once, on the whole batch."
            )


def check_no_spread_values(name: str, arguments: Branch) -> None:
    """Raise `ArgumentError` for values that a strategy has distributed.

    Args:
      name: the function's.
      arguments: the structure of its arguments, by name.
    """
    pairs = zip(arguments.keys, arguments.entries, strict=True)
    found = [f"{path}: {kind}" for key, tree in pairs for path, kind in _distributed(tree, key)]
    if found:
        raise ArgumentError(
            f"{name} is called on values that a tf.distribute strategy has spread over its replicas:\n"
            f"{bullet_list(found)}\n"
            "It takes the whole batch, and splits that itself: iterate over the dataset itself, not over "
            "strategy.experimental_distribute_dataset(dataset)."
        )


def _distributed(tree: Tree, path: str) -> list[tuple[str, str]]:
    """Return the paths and kinds of distributed values in a structure."""
    if isinstance(tree, (CompositeLeaf, StaticLeaf)):
        kind = tree.spec.value_type if isinstance(tree, CompositeLeaf) else type(tree.value)
        spread = issubclass(kind, tf.distribute.DistributedValues) and not hasattr(kind, "assign")  # no variable
        return [(path, kind.__name__)] if spread else []
    if not isinstance(tree, Branch):
        return []
    pairs = zip(tree.keys, tree.entries, strict=True)
    return [found for key, entry in pairs for found in _distributed(entry, structures.step_path(tree.kind, path, key))]
