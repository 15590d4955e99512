"""What an update sends: every optimizer of Keras, on eight GPUs that need not be there, by the plan.

python -m benchmarks.updates [--optimizers Adam,SGD] [--models MLP] [--page docs/generated/updates.md]

An optimizer may clip, average, decay, and its update may stand in a branch: Keras adds gradients up over calls
(`gradient_accumulation_steps=`), and skips an update whose gradients are not finite (`LossScaleOptimizer`). Each cell
is a plan with `variables="auto"`, in multiples of P, the bytes of the weights: the larger of what the busiest device
sends and receives in a call. Nothing runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.storage import forms
from graphsplit.planning.device_bytes import on_smaller_sides, traffic
from graphsplit.planning.tasks import OPERATION, SEND, tasks_of

GPUS = [f"GPU:{k}" for k in range(8)]
MOST_P = 2.0
"""What a cell may have: bytes through the busiest device, in weights' bytes."""

NAMES = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion")
NEWER = ("Lamb", "Muon", "ScheduleFreeAdamW")
"""Optimizers that not every version of Keras 3 has."""

MORE: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipnorm": {"clipnorm": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "EMA": {"use_ema": True},
    "weight decay": {"weight_decay": 0.01},
}
WAYS = ("as it is", "accumulation 2", "loss scaling")


@dataclass(frozen=True)
class Row:
    """One cell of the table.

    Attributes:
      model, optimizer, variant, way: which.
      p: what the busiest device sends or receives, in weights' bytes.
      operations: how many the first device runs, as a multiple of the median device's.
      why: what keeps it from less, if it is above what a cell may have.
    """

    model: str
    optimizer: str
    variant: str
    way: str
    p: float
    operations: float
    why: str = ""

    @property
    def is_above(self) -> bool:
        """Whether it is above what a cell may have, as printed."""
        return round(self.p, 1) > MOST_P


def mlp() -> tuple[keras.Model, list[tf.TensorSpec]]:
    """Return four layers of 512 units, and what they are given."""
    layers = [keras.layers.Dense(512, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((512,)), *layers]), [tf.TensorSpec((256, 512))] * 2


def embedding() -> tuple[keras.Model, list[tf.TensorSpec]]:
    """Return a table of 4096 words and three layers, and what they are given: sparse gradients beside dense ones."""
    layers = [keras.layers.Embedding(4096, 256), keras.layers.GlobalAveragePooling1D()]
    layers += [keras.layers.Dense(512, "relu"), keras.layers.Dense(512, "relu"), keras.layers.Dense(512)]
    words = tf.TensorSpec((256, 64), tf.int32)
    return keras.Sequential([keras.Input((64,), dtype="int32"), *layers]), [words, tf.TensorSpec((256, 512))]


MODELS: dict[str, Callable[[], tuple[keras.Model, list[tf.TensorSpec]]]] = {"MLP": mlp, "embedding": embedding}


def optimizers() -> list[str]:
    """Return the names of the optimizers that the installed Keras has."""
    return [*NAMES, *[name for name in NEWER if hasattr(keras.optimizers, name)]]


def planned(model: str, optimizer: str, variant: str, way: str) -> Row:
    """Return one cell: of a step of the model's own loop."""
    keras.backend.clear_session()
    options = {**MORE.get(optimizer, {}), **VARIANTS[variant]}
    options |= {"gradient_accumulation_steps": 2} if way == WAYS[1] else {}
    template, specs = MODELS[model]()
    updating = getattr(keras.optimizers, optimizer)(**options)
    if way == WAYS[2]:
        updating = keras.optimizers.LossScaleOptimizer(updating)
    template.compile(updating, "mse")
    plan = gs.multi_gpu_model(template, GPUS, variables="auto").plan(*specs)
    weights = sum(4 * variable.shape.num_elements() for variable in map(_value, template.trainable_variables))
    row = Row(model, optimizer, variant, way, max(traffic(plan).busiest[1:]) / weights, _operations(plan))
    return Row(**{**vars(row), "why": why(plan, weights)}) if row.is_above else row


def _value(variable: keras.Variable) -> tf.Variable:
    return variable.value


def _operations(plan: gs.inspect.Plan) -> float:
    counts = Counter([task.device for task in tasks_of(plan).tasks if task.kind == OPERATION])
    of_gpus = [counts[device] for device in plan.devices]
    return of_gpus[0] / statistics.median(of_gpus)


def why(plan: gs.inspect.Plan, weights: int) -> str:
    """Return what stays a branch, or what the busiest device gets or sends most of, in weights' bytes."""
    notes = [note.partition("one device: ")[2] for note in plan.program.notes if "stays a branch" in note]
    if notes:
        return f"stays a branch: {notes[0]}"
    device, sent, received = traffic(plan).busiest
    tasks, found = tasks_of(plan).tasks, Counter[str]()
    left_out = on_smaller_sides(plan, tasks)
    for n, task in enumerate(tasks):
        if task.kind == SEND and task.reads[0] is not None and n not in left_out:
            source = tasks[task.reads[0].task]
            if device == (task.device if received >= sent else source.device) and task.op is not None:
                found[plan.program.ops[task.op].type] += task.bytes[0]
    most = [f"{size / weights:.1f} P of {kind}" for kind, size in found.most_common(3) if size > weights / 20]
    return f"the busiest device {'gets' if received >= sent else 'sends'} {', '.join(most)}"


def rows(models: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    """Yield all cells, one after the other."""
    for model in models:
        for optimizer in names:
            for variant in VARIANTS:
                for way in WAYS:
                    yield planned(model, optimizer, variant, way)


def table(found: Sequence[Row]) -> str:
    """Return the cells as tables, one for each model, and why some are above what a cell may have."""
    text = []
    for model in dict.fromkeys(row.model for row in found):
        own = [row for row in found if row.model == model]
        head = [f"{variant}" for variant in dict.fromkeys(row.variant for row in own)]
        text += [f"## {model}", "", "| optimizer | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
        for optimizer in dict.fromkeys(row.optimizer for row in own):
            cells = [_cell([r for r in own if (r.optimizer, r.variant) == (optimizer, variant)]) for variant in head]
            text.append(f"| {optimizer} | " + " | ".join(cells) + " |")
        reasons: dict[str, list[str]] = {}
        for row in own:
            if row.is_above:
                reasons.setdefault(row.why, []).append(f"{row.optimizer}, {row.variant}, {row.way}")
        text += ["", *[_reason(why, cells) for why, cells in reasons.items()], ""]
    return "\n".join(text).strip() + "\n"


def _reason(why: str, cells: Sequence[str]) -> str:
    more = f", and {len(cells) - 2} more" if len(cells) > 2 else ""
    return f"* {'; '.join(cells[:2])}{more}: {why}"


def _cell(found: Sequence[Row]) -> str:
    """Return the cells of one optimizer and variant, in the order of `WAYS`."""
    return ", ".join([f"**{row.p:.1f}**" if row.is_above else f"{row.p:.1f}" for row in found])


_PAGE = """# What an update sends

Optimizers of Keras, with what they may do besides, and with their update in a branch: as it is,
`gradient_accumulation_steps=2`, and in a `LossScaleOptimizer`, in this order. Plans of a training step of 256 rows on
`GPU:0` to `GPU:7` with `variables="auto"`; nothing runs. The numbers are multiples of P, the bytes of the weights: the
larger of what the busiest device sends and receives in a call. An all-reduce of the gradients is 1.75 P.

Bold is what is above {most_p} P; below each table stands why. The first device runs {fewest:.1f} to {most:.1f} times
the operations of the median device: what is small, a bias or a count of steps, is updated there.
With an embedding, `SplitV` is also sums of rows: Adam adds up rows and, by themselves, their squares. And RMSprop and
Adafactor divide rows by a table; Keras does that in a branch that says how many rows are left, on one device.
`python -m benchmarks.updates --page docs/generated/updates.md` writes this page, and `tests/test_updates.py` checks a
sample.{left_out}

{tables}"""


def page(found: Sequence[Row]) -> str:
    """Return the page of the documentation."""
    operations = [row.operations for row in found]
    left = [name for name in optimizers() if name not in {row.optimizer for row in found}]
    left_out = f" Not planned for this page: {', '.join(left)}." if left else ""
    bounds = {"most_p": MOST_P, "fewest": min(operations), "most": max(operations)}
    return _PAGE.format(**bounds, left_out=left_out, tables=table(found))


def main() -> None:
    """Plan all cells, and print or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", default=",".join(optimizers()))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    found, begin = [], time.monotonic()
    for row in rows(options.models.split(","), options.optimizers.split(",")):
        found.append(row)
        print(f"{time.monotonic() - begin:.0f} s", row, flush=True)
    print(table(found))
    if options.page:
        forms.write(str(options.page), page(found).encode())


if __name__ == "__main__":
    main()
