"""What of Keras' tests says nothing of graphsplit, each with its reason."""

from __future__ import annotations

import fnmatch

_DEVICES = "It makes logical devices of its own, after which those of this process are gone"

# Patterns of pytest's names of tests, without the folders before keras/src.
NOT_OURS: dict[str, str] = {
    "optimizers/optimizer_sparse_test.py::OptimizerSparseTest::test_sparse_gradients_*": (
        "They replace the methods that assign to TensorFlow's variables, which give variables back their values here"
    ),
    "layers/preprocessing/image_preprocessing/random_posterization_test.py::RandomPosterizationTest::test_layer": (
        "It casts negative numbers to uint8, which has none: the vectorized part of a kernel and what remains give "
        "others, so a single device gives others for another number of rows"
    ),
    "ops/nn_test.py::NNOpsCorrectnessTest::test_moments_sync_with_distribution_strategy*": _DEVICES,
    "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": _DEVICES,
    "backend/tensorflow/distribute_test.py::DistributeTest::*": _DEVICES,
    "backend/tensorflow/optimizer_distribute_test.py::OptimizerDistributeTest::*": _DEVICES,
}


def reason_against(name: str) -> str:
    """Return why a test says nothing of graphsplit; nothing if it does."""
    name = name.rpartition("keras/src/")[2]
    return next((reason for pattern, reason in NOT_OURS.items() if fnmatch.fnmatchcase(name, pattern)), "")
