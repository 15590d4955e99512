"""A pytest plugin that lets tests of Keras, as they are in its wheel, run with `keras.distribution` enabled.

It is for a process of its own: one of these tests clears the environment. `python -m tests.helpers.keras_upstream FILE`
writes the JAX backend's tests to a file in terms of graphsplit: `variable._value.sharding` becomes
`sharding_of(variable)`, and `jax` this module.
"""

from __future__ import annotations

import ast
import gc
import math
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.keras.distribution import enabling

DEVICES = 4
MODEL = 2  # of them along the axis of that name, in these tests
SOURCES = Path(keras.__file__).parent / "src"


def pytest_configure() -> None:
    gs.use_logical_devices(DEVICES)
    gs.keras.enable_distribution()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lift what is skipped on other backends than JAX."""
    for item in items:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]


class PartitionSpec:
    """The axes of a mesh along which a value is cut; None for axes that are whole."""

    def __init__(self, *axes: str | None):
        self.axes = axes


class sharding_of:  # noqa: N801  # (called as a function)
    """How graphsplit has laid a variable out: along which axis of the mesh each of its dimensions is cut."""

    def __init__(self, variable: Any):
        parts = parts_of_variable(variable.value)
        self._axes = (None,) * len(variable.shape) if parts is None else tuple(parts.layout)
        if parts is not None:
            assert len(parts.devices) == MODEL
            cut = math.prod(variable.shape) * variable.value.dtype.size // MODEL
            assert [size for size in parts.bytes_on_devices().values() if size] == [cut] * MODEL

    @property
    def spec(self) -> sharding_of:
        return self

    @property
    def is_fully_replicated(self) -> bool:
        return not any(self._axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and other.axes == self._axes

    __hash__ = None  # type: ignore[assignment]


class InspectedTensor:
    """A tensor of a step, whose layout is looked up in the plan of the training step that ran."""

    def __init__(self, tensor: Any):
        self._name = getattr(tensor, "name", "").partition(":")[0]

    def is_equivalent_to(self, expected: Any, ndim: int) -> bool:
        assert expected.axes == ("batch", None)
        assert ndim == 2
        [running] = enabling._enabled
        gc.collect()  # models of tests before hold themselves in circles
        [model] = running._models
        plan = model.train_function.plan()
        assert [len(column) for column in plan.mesh.columns] == [DEVICES // MODEL] * MODEL
        assert len(plan.devices) == DEVICES // MODEL
        made = [op.provenance.column for op in plan.sharded_ops if op.provenance.origin == self._name]
        return sorted(made, key=str) in ([None], list(range(MODEL)))  # once for each row, or in each of its columns


def _inspect(tensor: Any, callback: Any) -> None:
    callback(InspectedTensor(tensor))


def jax_in_terms_of_graphsplit() -> types.ModuleType:
    """Return what of `jax` the tests need that are about Keras."""
    jax = types.ModuleType("jax")
    jax.device_count = lambda: DEVICES
    jax.default_backend = lambda: "cpu"
    jax.distributed = mock.Mock()
    jax.debug = types.SimpleNamespace(inspect_array_sharding=_inspect)
    jax.sharding = types.SimpleNamespace(PartitionSpec=PartitionSpec, NamedSharding=lambda mesh, spec: spec)
    jax.experimental = types.SimpleNamespace(layout=None)
    return jax


class _Translated(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> Any:
        return None if node.names[0].name == "jax" else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return None if (node.module or "").startswith("jax") else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        inner = node.value
        if node.attr == "sharding" and isinstance(inner, ast.Attribute) and inner.attr == "_value":
            return ast.Call(ast.Name("sharding_of", ast.Load()), [inner.value], [])
        return node


FIRST_LINES = """from tests.helpers.keras_upstream import jax_in_terms_of_graphsplit, sharding_of, PartitionSpec as P
jax = jax_in_terms_of_graphsplit()
jax_layout = None
"""

if __name__ == "__main__":
    tree = ast.parse((SOURCES / "backend" / "jax" / "distribution_lib_test.py").read_text())
    Path(sys.argv[1]).write_text(FIRST_LINES + ast.unparse(ast.fix_missing_locations(_Translated().visit(tree))))
