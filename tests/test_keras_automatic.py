"""Keras models where copies take time, as between GPUs: tests of other files which shards by default."""

from __future__ import annotations

import pytest

from tests import test_keras_models, test_keras_models_answer, test_keras_models_files, test_keras_models_use

FILES = test_keras_models, test_keras_models_answer, test_keras_models_files, test_keras_models_use
LEFT_OUT = {  # what has nothing to do with where variables are
    "test_equals_the_template_in_float32",  # (in float64 is enough)
    "test_kinds_of_data",
    "test_the_chosen_combinations_cover_every_value",
    "test_verify_takes_nothing_else",
    "test_progress_bar_and_history_are_as_usual",
    "test_eager_steps_say_what_they_cost",
    "test_many_shapes_are_warned_of_once",
    "test_no_trainable_weights_is_keras_own_warning",
    "test_training_loop_without_wrapping",
    "test_a_step_that_there_is_not_and_one_that_is_eager",
}
FIXTURES = {"float64", "own_model"}
globals().update(
    {
        name: value
        for file in FILES
        for name, value in vars(file).items()
        if name in FIXTURES or (name.startswith("test_") and callable(value) and name not in LEFT_OUT)
    }
)
pytestmark = pytest.mark.usefixtures("copies_take_time", "plain_oracle")


@pytest.fixture(autouse=True)
def in_float64(request: pytest.FixtureRequest) -> None:
    """Compute in float64 where the tests of a file do."""
    if request.function.__module__ == test_keras_models_use.__name__:
        request.getfixturevalue("float64")
