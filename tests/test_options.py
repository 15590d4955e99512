"""The options: one dataclass, with which all signatures, docstrings, pages and the command line agree."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import graphsplit as gs
from graphsplit.api.options import USUAL, Options, Tuning
from graphsplit.cli import app
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.renamed import OPTIONS as OLD
from graphsplit.planning.costs.machine_files import machine

_SPEC = importlib.util.spec_from_file_location("options", Path(__file__).parent.parent / "ci" / "options.py")
pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pages)
BRIEF = pages.brief()  # the options in their order, each with a line
OTHERWISE = {"variables": "auto"}  # defaults of `multi_gpu_model` that are other ones


def test_the_order_is_that_of_the_dataclass():
    assert list(inspect.signature(gs.parallelize).parameters)[1:] == list(BRIEF)
    assert len(BRIEF) == 14
    assert gs.parallelize().keywords["options"] == Options(), "the defaults are those of the dataclass"


def test_options_are_handed_on_as_they_are_given():
    """One that `parallelize` has and `Options` lacks, or that is not passed to it, would be lost without a word."""
    given = {
        "devices": 3,
        "mesh": MeshAxes((("data", 3),), "data"),
        "split": 1,
        "shares": (3.0, 1.0),
        "variables": "auto",
        "micro_batches": 2,
        "stages": 3,
        "schedule": "gpipe",
        "recompute": 0.5,
        "jit_compile": True,
        "strict": True,
        "plan": machine("dgx-a100"),
        "memory": 1e9,
        "tuning": {"bucket_bytes": 7},
    }
    assert list(given) == list(BRIEF)
    for name, value in given.items():
        called = {name: dict(value.sizes) if name == "mesh" else value}
        waiting = gs.parallelize(**called)  # for a function
        assert waiting.keywords["options"] == Options(**{name: value}) != Options()


def test_models_have_the_same_names_in_the_same_order():
    own = inspect.signature(gs.multi_gpu_model).parameters
    shared = [name for name, told in own.items() if told.kind == told.KEYWORD_ONLY]
    assert shared == [name for name in BRIEF if name not in ("devices", "split", "jit_compile", "tuning")]
    usual = inspect.signature(gs.parallelize).parameters
    for name in shared:
        assert own[name].default == OTHERWISE.get(name, usual[name].default), name


@pytest.mark.parametrize("function", [gs.predict, gs.scaling], ids=lambda function: function.__name__)
def test_predictions_have_the_same_names_in_the_same_order(function: Any):
    own = [name for name in inspect.signature(function).parameters if name in BRIEF]
    assert own == [name for name in BRIEF if name in own]
    assert {"devices", "mesh", "micro_batches"} <= set(own)
    assert not set(inspect.signature(function).parameters) & set(OLD) - {"machine"}


def test_each_option_is_told_in_a_line_and_at_length():
    told = pages.entries(gs.parallelize, "Args")
    assert list(told) == ["fn", *BRIEF]
    for name, line in BRIEF.items():
        assert told[name].startswith(line.rstrip(".")), name
    assert list(pages.entries(Tuning, "Attributes")) == list(USUAL) == list(Tuning.__annotations__)


def test_the_command_line_says_the_same():
    """Where it asks for one value: `predict --devices` takes several numbers."""
    commands, seen = typer.main.get_command(app).commands, set()
    for command in ("inspect", "transpile", "predict", "validate"):
        for option in commands[command].params:
            if option.name in BRIEF and option.metavar != "NUMBERS":
                line = BRIEF[option.name].rstrip(".")
                begin = "How many devices" if option.name == "devices" else line[0].upper() + line[1:]
                assert option.help.startswith(begin), f"{command} {option.name}"
                seen.add(option.name)
    assert seen == {"devices", "split", "strict", "micro_batches"}


@pytest.mark.parametrize("option", OLD)
def test_old_options_print_the_new_spelling(option: str):
    with pytest.raises(TypeError, match=rf"parallelize\(\) has no option {option}=\. {option}= is now \w+"):
        gs.parallelize(**{option: 3})
    assert option not in BRIEF


def test_an_old_option_is_no_option_of_what_never_had_it():
    with pytest.raises(TypeError, match=r"has no option weights=\. It has layout=, devices=, mesh="):
        gs.set_variable_layout([], weights=[3, 1])


def test_a_model_on_unequal_devices():
    import keras

    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = gs.multi_gpu_model(net, 2, shares=[3, 1])
    x = np.arange(28, dtype=np.float32).reshape(7, 4)
    assert model.plan(x).rows == (5, 2)
    np.testing.assert_allclose(model.predict(x, verbose=0), net(x), 1e-5, 1e-5)
    with pytest.raises(gs.errors.ArgumentError, match=r"shares=\[3, 1, 1\] has 3 entries for 2 devices"):
        gs.multi_gpu_model(net, 2, shares=[3, 1, 1])
