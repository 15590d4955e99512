"""What a program is: arguments, variables, lines, and the setting in which it runs; and its source."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs

ROWS = "rows"
OTHERS = "(rows * 3 % 7 + 1)"  # an open size of its own: other rows, other sizes, and neither is the larger one
Dim = int | str
_NAME = re.compile(r"\b[vwx]\d+\b")
_EFFECT = re.compile(r"assign|scatter_|\.handle|debugging|numbers\.")


@dataclass(frozen=True)
class Input:
    """An argument of the program, or a variable that it captures.

    Attributes:
      name: `x3` or `w3`; the number also seeds its values.
      values: an expression in `random(3)`, with a `{}` for the shape.
      dims: its shape, in which `rows` is the size of the batch, and `OTHERS` another open one.
      axis: that along which it is split; None for one that stays whole.
      layout: how a variable lies on the devices; "" for where it was made, a tuple for one that is cut along axes of a
        mesh, and used where its parts are: for each dimension an axis, several of them, or None.
      rest: how it lies along the other axes of that mesh; "" for on the first device of each.
    """

    name: str
    values: str
    dims: tuple[Dim, ...]
    dtype: str
    axis: int | None = None
    layout: str | tuple[str | tuple[str, ...] | None, ...] = ""
    rest: str = ""

    @property
    def spelled_layout(self) -> str:
        """The layout as a script has it."""
        if isinstance(self.layout, str):
            return f'"{self.layout or "home"}"'
        names = ", ".join('gs.cut("batch", in_place=True)' if name == "batch" else repr(name) for name in self.layout)
        dimensions = f"({names}{',' * (len(self.layout) == 1)})".replace("'", '"')
        return f'({dimensions}, "{self.rest}")' if self.rest else dimensions

    @property
    def source(self) -> str:
        comma = "," if len(self.dims) == 1 else ""
        shape = f"({', '.join(map(str, self.dims))}{comma})"
        values = re.sub(r"(?<!\.)\brandom\b", f"random({self.name[1:]})", self.values.replace("{}", shape))
        return values if self.is_composite else f"tf.constant({values})"

    @property
    def is_composite(self) -> bool:
        """Whether it is ragged or sparse, and so never split."""
        return self.dtype in ("ragged", "sparse")

    def split_along(self, axis: int | None) -> Input:
        """Return the same, split along an axis that is the batch, or else whole."""
        is_batch = axis is not None and self.dims[axis : axis + 1] == (ROWS,) and not self.is_composite
        return dataclasses.replace(self, axis=axis if is_batch else None)

    @property
    def spec(self) -> str:
        sizes = ", ".join("None" if isinstance(dim, str) else str(dim) for dim in self.dims)
        return f"tf.TensorSpec([{sizes}], tf.{self.dtype})"


@dataclass(frozen=True)
class Line:
    """`target = expression`."""

    target: str
    expression: str

    @property
    def reads(self) -> set[str]:
        return names_in(self.expression)


@dataclass(frozen=True)
class Setting:
    """How a program runs.

    Attributes:
      inside, outside: how many tapes are in the function that is parallelized, and around it.
      sizes: `known`; or unknown because of an input `signature`, or because sizes differ from call to call (`retrace`).
      rows: the batch size of each call.
      by_default: whether it is left to `parallelize` which arguments to split.
      in_graph: whether the call, with the tapes around it, is in a `tf.function`.
      mesh: its axes, and how many devices each has; none if all are along the batch.
      micro_batches, schedule: of each device, and their order in the stages of the mesh.
      at_once: whether small sums go from each shard to each, as between GPUs.
    """

    devices: int = 2
    inside: int = 0
    outside: int = 0
    sizes: str = "known"
    rows: tuple[int, ...] = (5,)
    shares: tuple[int, ...] | None = None
    default_device: str | None = None
    by_default: bool = False
    in_graph: bool = False
    mesh: tuple[tuple[str, int], ...] = ()
    micro_batches: int = 1
    schedule: str | None = None
    at_once: bool = False

    @property
    def on_devices(self) -> str:
        """The option that says on which devices a program runs."""
        if not self.mesh:
            return f"devices={self.devices}"
        return "mesh={" + ", ".join(f'"{name}": {size}' for name, size in self.mesh) + "}"

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh along which rows and variables are cut."""
        return {name: size for name, size in self.mesh if name != "stage"}


@dataclass(frozen=True)
class Program:
    """A function of lines, what it takes, what it returns, and how it runs."""

    arguments: tuple[Input, ...]
    variables: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    setting: Setting

    @property
    def size(self) -> int:
        """How much there is to read."""
        return len(self.source)

    @property
    def has_tapes(self) -> bool:
        """Whether gradients are asked for, in the function or around it."""
        return self.setting.inside + self.setting.outside > 0

    def without_tapes(self) -> Program:
        """Return the program with nothing differentiated but by itself."""
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, inside=0, outside=0))

    @property
    def source(self) -> str:
        """A script that compares one device with several."""
        return _SCRIPT.format(
            make=_make(self),
            arguments="".join(f"        {x.source},\n" for x in self.arguments),
            helpers=_GRAD * any("grad(" in line.expression for line in self.lines) + _GRADIENTS * self.has_tapes,
            results=_layouts(self) + _results(self),
        )

    def load(self, **names: Any) -> dict[str, Any]:
        """Return the names that the script defines."""
        namespace = {"__name__": "fuzzed", **names}
        exec(compile(self.source, "<fuzzed>", "exec"), namespace)
        return namespace

    def tidied(self) -> Program:
        """Return the program without what nobody reads."""
        needed = {name for output in self.outputs for name in names_in(output)}
        lines = []
        for line in reversed(self.lines):
            if line.target in needed or _EFFECT.search(line.expression):
                lines.append(line)
                needed |= line.reads
        arguments = tuple(x for x in self.arguments if x.name in needed) or self.arguments[:1]
        variables = tuple(w for w in self.variables if w.name in needed)
        return dataclasses.replace(self, arguments=arguments, variables=variables, lines=tuple(lines[::-1]))

    def noisy(self) -> Program:
        """Return the program with every value passed through `jitter`."""
        first = [Line(x.name, f"jitter({x.name})") for x in self.arguments]
        rest = [Line(line.target, f"jitter({line.expression})") for line in self.lines]
        return dataclasses.replace(self, lines=(*first, *rest))


def size_of(dim: Dim, rows: int) -> int:
    """Return the size of an axis in a call with so many rows."""
    return rows if dim == ROWS else rows * 3 % 7 + 1 if dim == OTHERS else int(dim)


def names_in(expression: str) -> set[str]:
    """Return the arguments, variables and targets that an expression mentions."""
    return set(_NAME.findall(expression))


@functools.cache
def _helpers() -> types.CodeType:
    return compile(_IMPORTS + _GRAD, "<fuzzed>", "exec")


def helper_names() -> dict[str, Any]:
    """Return what lines may use besides arguments, variables and targets."""
    names: dict[str, Any] = {"__name__": "fuzzed"}
    exec(_helpers(), names)
    assert names["tf"] is tf
    assert names["np"] is np
    assert names["gs"] is gs
    return names


def _make(program: Program) -> str:
    lines = [f"    {w.name} = tf.Variable({w.source})" for w in program.variables]
    if any("numbers." in line.expression for line in program.lines):
        lines.append("    numbers = tf.random.Generator.from_seed(1)")
    lines += ["", "    @tf.autograph.experimental.do_not_convert"]
    lines += [f"    def f({', '.join(x.name for x in program.arguments)}):"]
    lines += [f"        {line.target} = {line.expression}" for line in program.lines]
    lines += [f"        return [{', '.join(program.outputs)}]", ""]
    lines += [f"    return f, [{', '.join(w.name for w in program.variables)}]"]
    return "\n".join(lines)


def _layouts(program: Program) -> str:
    """Return what lays variables out, however small they are: all but single numbers."""
    if not any(w.layout for w in program.variables):
        return ""
    names = ", ".join(w.spelled_layout for w in program.variables)
    comma = "," if len(program.variables) == 1 else ""
    return f"""\
    partitioning.STAYS = 8
    for variable, layout in zip(variables, ({names}{comma})) if parallel else ():
        gs.set_variable_layout(variable, layout, {program.setting.on_devices})
"""


def _results(program: Program) -> str:
    setting = program.setting
    options = [setting.on_devices]
    if not setting.by_default:
        axes = ", ".join(f'"{x.name}": {x.axis}' for x in program.arguments)
        options.append(f"split={{{axes}}}")
    options += [f"shares={list(setting.shares)}"] if setting.shares else []
    options += [f"micro_batches={setting.micro_batches}"] if setting.micro_batches > 1 else []
    options += [f'schedule="{setting.schedule}"'] if setting.schedule else []
    tuning = [f'"default_device": "{setting.default_device}"'] if setting.default_device else []
    tuning += ['"exchange_bytes": 1 << 19'] if setting.at_once else []
    single = "tf.function(f, autograph=False)"
    lines = ["f = gradients(f, variables)"] * setting.inside
    if setting.sizes == "retrace":
        tuning.append('"reduce_retracing": True')
        single = "tf.function(f, autograph=False, reduce_retracing=True)"
    elif setting.sizes == "signature":
        specs = ", ".join(x.spec for x in program.arguments)
        lines.append(f"f = tf.function(f, input_signature=[{specs}], autograph=False)")
        single = "f"
    options += [f"tuning={{{', '.join(tuning)}}}"] if tuning else []
    lines.append(f"g = gs.parallelize(f, {', '.join(options)}) if parallel else {single}")
    lines += ["g = gradients(g, variables)"] * setting.outside
    lines += ["g = tf.function(g, autograph=False)"] if setting.in_graph else []
    calls = ", ".join(map(str, setting.rows))
    comma = "," if len(setting.rows) == 1 else ""
    lines.append(f"return [(g(*arguments(rows)), [w.value() for w in variables]) for rows in ({calls}{comma})]")
    return "\n".join(f"    {line}" for line in lines)


_IMPORTS = """\
import functools

import numpy as np
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.variables import partitioning


def random(number):
    return np.random.default_rng(number)
"""
_GRAD = """

def grad(f, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x, unconnected_gradients="zero")
"""
_GRADIENTS = """

def total(outputs):
    tensors = [v for v in tf.nest.flatten(outputs, expand_composites=True) if v is not None]
    floats = [v for v in tensors if v.dtype.is_floating or v.dtype.is_complex]
    parts = [tf.reduce_sum(tf.sin(tf.cast(tf.math.real(v), tf.float64))) for v in floats]
    return tf.add_n(parts) if parts else tf.constant(0.0)


def gradients(f, variables):
    @functools.wraps(f)
    @tf.autograph.experimental.do_not_convert
    def with_gradients(*arguments):
        tensors = [v for v in (*arguments, *variables) if isinstance(v, (tf.Tensor, tf.Variable))]
        sources = [v for v in tensors if v.dtype.is_floating or v.dtype.is_complex]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = f(*arguments)
            loss = total(outputs)
        found = tape.gradient(loss, sources)
        return outputs, [None if g is None else tf.convert_to_tensor(g) for g in found]

    return with_gradients
"""
_SCRIPT = (
    _IMPORTS
    + """{helpers}

def make():
{make}


def arguments(rows):
    return [
{arguments}    ]


def results(parallel):
    tf.random.set_seed(0)
    f, variables = make()
{results}


if __name__ == "__main__":
    gs.use_logical_devices(8)
    print("one device:", results(False), "several:", results(True), sep="\\n")
"""
)
