"""What of Keras' tests says nothing of graphsplit, each with its reason."""

from __future__ import annotations

import fnmatch

_DEVICES = "It makes logical devices of its own, after which those of this process are gone"
_NEGATIVES = (
    "It casts negative numbers to uint8, which has none: the vectorized part of a kernel and what remains give "
    "others, so a single device gives others for another number of rows"
)
_WARNINGS = "It counts warnings, and each call here is made plain as well, which warns once more"
_PYTHON_RANDOM = "The layer asks Python's random numbers while it is traced, so each trace is another function"
_CHANGES_ARGUMENT = (
    "It looks at the dict that it gave to the layer, which the layer changes; what is traced, by tf.function too, has "
    "a dict of its own"
)

# Patterns of pytest's names of tests, without the folders before keras/src.
NOT_OURS: dict[str, str] = {
    "optimizers/optimizer_sparse_test.py::OptimizerSparseTest::test_sparse_gradients_*": (
        "They replace the methods that assign to TensorFlow's variables, which give variables back their values here"
    ),
    "layers/preprocessing/image_preprocessing/random_posterization_test.py::RandomPosterizationTest::test_layer": (
        _NEGATIVES
    ),
    "layers/preprocessing/image_preprocessing/aug_mix_test.py::RandAugmentTest::test_layer": _PYTHON_RANDOM,
    "layers/preprocessing/image_preprocessing/aug_mix_test.py::RandAugmentTest::test_random_augment_randomness": (
        _PYTHON_RANDOM
    ),
    "layers/preprocessing/image_preprocessing/random_crop_test.py::RandomCropTest::test_dict_input": (
        _CHANGES_ARGUMENT
    ),
    "models/functional_test.py::FunctionalTest::test_input_dict_with_extra_field": _WARNINGS,
    "models/functional_test.py::FunctionalTest::test_warning_for_mismatched_inputs_structure": _WARNINGS,
    "quantizers/awq_test.py::AWQAlgorithmTest::test_quantize_matrix_various_group_sizes_*_8": _NEGATIVES,
    "quantizers/gptq_test.py::TestModelQuantization::test_quantize_gptq_combinations_*_group_wise*": _NEGATIVES,
    "quantizers/quantizers_test.py::ComputeScaleZeroTest::test_weight_per_channel_grouped_shapes_and_count": _NEGATIVES,
    "ops/nn_test.py::NNOpsCorrectnessTest::test_moments_sync_with_distribution_strategy*": _DEVICES,
    "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": _DEVICES,
    "backend/tensorflow/distribute_test.py::DistributeTest::*": _DEVICES,
    "backend/tensorflow/optimizer_distribute_test.py::OptimizerDistributeTest::*": _DEVICES,
}


def reason_against(name: str) -> str:
    """Return why a test says nothing of graphsplit; nothing if it does."""
    name = name.rpartition("keras/src/")[2]
    return next((reason for pattern, reason in NOT_OURS.items() if fnmatch.fnmatchcase(name, pattern)), "")
