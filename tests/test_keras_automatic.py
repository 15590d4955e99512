"""Keras models where copies take time, as between GPUs: tests of other files, which shards by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.processes import python

ROOT = Path(__file__).parent.parent
LEFT_OUT = (  # what has nothing to do with where variables are
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
)


@pytest.mark.long
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("topic", ["models", "models_answer", "models_files", "models_use"])
def test_what_is_about_keras_models_holds_where_copies_take_time(topic: str):
    call = ["-m", "pytest", f"tests/test_keras_{topic}.py", "-n", "0", "-q", "-m", "long or not long"]
    environment = {**os.environ, "GRAPHSPLIT_TEST_COPIES_TAKE_TIME": "1"}
    done = python(*call, "-k", f"not ({' or '.join(LEFT_OUT)})", cwd=ROOT, env=environment, timeout=3600)
    assert done.returncode == 0, done.stdout[-5000:]
