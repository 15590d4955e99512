"""What a program is read from: a flat graph, what is known of it beforehand, and what only is handed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.polynomials import SizesAt, Symbol
from graphsplit.core.sizes import Shape
from graphsplit.program.program import Locate, Provenance
from graphsplit.program.reading.shape_inference import Findings
from graphsplit.program.stages import StageCalls

Elements = tuple[tf.DType, Shape | None]
"""What a list or a variable holds: a type, and a shape where it is known."""


@dataclass(frozen=True, kw_only=True)
class FlatGraph:
    """A graph whose calls are inlined.

    Attributes:
      nodes: the `NodeDef`s, in any order.
      inputs, captures: names of placeholder nodes.
      outputs: references (`node:0`) of the returned tensors.
      effects: names of nodes that must run.
      library, versions: of the graph.
    """

    nodes: Sequence[Any]
    inputs: Sequence[str]
    outputs: Sequence[str]
    library: Any
    versions: Any
    captures: Sequence[str] = ()
    effects: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class KnownBefore:
    """What is known of a graph before it is read.

    Attributes:
      resources: for captured variables, what they hold, without which no shape behind a read is known.
      shapes: of inputs, by name, where they say more than the placeholders do: what follows from unknown sizes.
      held: for inputs that are lists of integers known beforehand, each of their elements alike: that element.
      counts: for inputs that are lists: how many elements they have, where that is known.
      values: of inputs that are shapes, where they are known, or follow from unknown sizes.
      symbols: the unknown sizes of the program that this is a part of.
      inlined_from: the graph that the nodes were, before calls were inlined. It knows shapes that were set by hand.
      results: shape and dtype of all that each node makes, by name, each behind what it reads: where they are known,
        TensorFlow is not asked.
      findings: what was found beforehand, for all sizes.
      point: what these sizes are, in a program that is for some only: all given shapes are numbers then.
    """

    resources: Mapping[str, Elements] = field(default_factory=dict)
    shapes: Mapping[str, Shape | None] = field(default_factory=dict)
    held: Mapping[str, np.ndarray] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Shape] = field(default_factory=dict)
    symbols: tuple[Symbol, ...] = ()
    inlined_from: tf.Graph | None = None
    results: Mapping[str, Sequence[tuple[Shape | None, tf.DType]]] | None = None
    findings: Findings = Findings()  # noqa: RUF009  # frozen
    point: SizesAt | None = None


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a program says of itself.

    Attributes:
      input_names: as users know them.
      seeds: how many of the inputs, the last, are gradients of outputs.
      notes: for the plan.
      locate: returns where in the user's code an operation was made.
      calls: those of stages among the calls that were inlined.
      provenance: says where an operation comes from, given its name; None for what the name says.
      provenances: the same for operations in functions, by the functions' names.
    """

    input_names: Sequence[str]
    seeds: int = 0
    notes: Sequence[str] = ()
    locate: Locate = lambda _: ()
    calls: StageCalls = StageCalls()  # noqa: RUF009  # frozen
    provenance: Callable[[str], Provenance] | None = None
    provenances: Mapping[str, Callable[[str], Provenance]] = field(default_factory=dict)
