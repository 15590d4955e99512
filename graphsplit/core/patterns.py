"""Names and patterns of names as users write them: which they fit, and what was meant by a wrong one."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import glob
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from graphsplit.core.renamed import REMOVED, renamed
from graphsplit.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_NEAR, _MOST_NEAR = 0.5, 3  # how alike names are that are suggested, of which 1 are equal ones; and how many
_NEAR_OPTION = 0.7  # how alike, of 1: `variables` and `devices`, which are no misspellings of each other, are 0.5
_NUMBER = re.compile(r"_\d+$")  # by which Keras and TensorFlow tell calls of one layer apart
_LAYOUTS = "Layouts belong to variables: gs.set_variable_layout(model, 'sharded', devices=...)."
_ELSEWHERE = {
    **dict.fromkeys(("layout", "layouts", "variable_layout"), _LAYOUTS),
    "jit_compile": "Keras has it: model.compile(..., jit_compile=True).",
    **REMOVED,
}
"""What others call something that is said in another way here."""
_CALLED = {
    ("devices", "gpus"): ("gpus", "num_gpus", "n_gpus", "ngpus", "num_devices", "device_ids", "devices"),
    ("micro_batches",): ("accumulate", "accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"),
    ("recompute",): ("remat", "checkpoint", "gradient_checkpointing"),
}
_OURS = {name: ours for ours, names in _CALLED.items() for name in names}
"""Options by the names that others give them."""
_HINTS = {
    "Write gs.parallelize(step, devices=4) for a function, gs.multi_gpu_model(model, gpus=4) for a Keras model.": (
        *("MirroredStrategy", "Strategy", "distribute", "DataParallel", "DistributedDataParallel", "DDP"),
        *("pmap", "pjit", "jit", "shard_map", "data_parallel", "parallel", "strategy", "function"),
    ),
    "Write gs.set_variable_layout(model, 'replicated', devices=4); the batch is split automatically.": (
        *("replicate", "replicated", "mirror", "mirrored", "broadcast"),
    ),
    "Write gs.set_variable_layout(model, 'sharded', devices=4); the batch is split automatically.": (
        *("shard", "sharded", "shard_tensor", "fully_shard", "FSDP", "FullyShardedDataParallel", "distribute_tensor"),
        *("ParameterServerStrategy", "ZeRO", "DTensor", "Layout", "LayoutMap", "NamedSharding", "PartitionSpec"),
    ),
    "A mesh is an option: gs.parallelize(step, mesh={'batch': 2, 'model': 4}).": (
        *("Mesh", "DeviceMesh", "make_mesh", "create_mesh", "mesh", "ModelParallel", "TensorParallel"),
        *("tensor_parallel", "parallelize_module"),
    ),
    "Stages are an option: gs.parallelize(step, devices=4, stages=4, micro_batches=8).": (
        *("Pipeline", "pipeline", "PipelineParallel", "PipelineStage", "stage", "stages", "GPipe"),
    ),
    "Write the step for one device and the whole batch; graphsplit adds the reductions over devices.": (
        *("all_reduce", "all_gather", "reduce_scatter", "psum", "pmean", "reduce", "get_replica_context"),
    ),
    "Write gs.connect(['host:2222', ...]), then gs.parallelize as on one machine.": (
        *("MultiWorkerMirroredStrategy", "ClusterSpec", "init_process_group", "init", "initialize_cluster"),
    ),
}
NAMES_ELSEWHERE = {name: hint for hint, names in _HINTS.items() for name in names}
"""What to write instead of names of other libraries."""


def fits(name: str, pattern: str) -> bool:
    """Return whether a shell pattern fits a name, from its beginning or from any `/` on; `*` stands for slashes, too.

    One that begins with `/` fits from the name's beginning only.

    >>> fits("sequential/embedding/embeddings", "embedding*"), fits("sequential/embedding/embeddings", "bedding*")
    (True, False)
    >>> fits("sequential/embedding/embeddings", "/embedding*"), fits("embedding/embeddings", "/embedding*")
    (False, True)
    """
    return fnmatch.fnmatchcase(f"/{name}", pattern if pattern.startswith("/") else f"*/{pattern}")


SLOTS = "slots of "
"""How a pattern begins that fits the slots of an optimizer, by the names of their variables: `"slots of dense*"`."""


def fits_variable(name: str, head: str | None, pattern: str) -> bool:
    """Return whether a pattern fits a variable; what fits one also fits its slots.

    Args:
      name: of the variable.
      head: the name of the variable that it is a slot of; None if it is no slot.
      pattern: see `fits`, and `SLOTS`.

    >>> [fits_variable("adam/m", "dense/kernel", pattern) for pattern in ("dense*", "slots of *", "slots of up*")]
    [True, True, False]
    >>> fits_variable("dense/kernel", None, "slots of *")
    False
    """
    if pattern.startswith(SLOTS):
        return head is not None and fits(head, pattern.removeprefix(SLOTS))
    return fits(name, pattern) or (head is not None and fits(head, pattern))


def scopes_of(name: str) -> list[str]:
    """Return the scopes of an operation, the outermost first.

    >>> scopes_of("sequential/dense_1/MatMul")
    ['sequential', 'sequential/dense_1']
    """
    parts = name.split("/")[:-1]
    return ["/".join(parts[: k + 1]) for k in range(len(parts))]


def scopes_fitting(option: str, patterns: Iterable[str], scopes: Sequence[str]) -> dict[str, list[str]]:
    """Return the scopes of operations that each pattern fits.

    Keras numbers the calls of a layer; the number need not be in the pattern: `dense` fits `dense_1`.

    Args:
      option: how the message of an error begins.
      patterns: of names of layers.
      scopes: of all operations.

    Raises:
      ArgumentError: if a pattern fits no scope; it suggests names like it.

    >>> scopes_fitting("stages", ["dense"], ["sequential", "sequential/dense_1"])
    {'dense': ['sequential/dense_1']}
    """
    scopes_by_pattern = {p: [s for s in scopes if fits(s, p) or fits(_NUMBER.sub("", s), p)] for p in patterns}
    for pattern in [pattern for pattern, fitting in scopes_by_pattern.items() if not fitting]:
        like = near(pattern, [_NUMBER.sub("", scope.rpartition("/")[2]) for scope in scopes]) or scopes[:3]
        raise ArgumentError(
            f"{option}: no operation is in a layer whose name {pattern!r} fits. "
            f"Names here are like {', '.join(map(repr, like)) or 'none, as no layer has one'}."
        )
    return scopes_by_pattern


def pattern_of(name: str) -> str:
    """Return the pattern that fits a name, and not a longer one that ends like it.

    >>> pattern_of("a[0]")
    '/a[[]0]'
    """
    return f"/{glob.escape(name)}"


def near(word: str, names: Iterable[str], cutoff: float = _NEAR) -> list[str]:
    """Return the few names, or patterns, that are most like what was asked, if any are.

    >>> near("devises", ["devices", "split"])
    ['devices']
    """
    return difflib.get_close_matches(word, list(dict.fromkeys(names)), n=_MOST_NEAR, cutoff=cutoff)


def meant(word: object, names: Iterable[str]) -> str:
    """Return the question whether the name was meant that is most like what was asked; "" if none is.

    >>> meant("modell", ["batch", "model"])
    " Did you mean 'model'?"
    """
    similar = difflib.get_close_matches(str(word), names, 1)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def scopes_and_names(names: Iterable[str]) -> list[str]:
    """Return patterns of everything in each scope of names, and the names outside of scopes.

    >>> scopes_and_names(["dense/kernel", "table"])
    ['dense/*', 'table']
    """
    patterns = dict[str, None]()
    for name in names:
        *scopes, last = name.split("/")
        patterns.update(dict.fromkeys([*[f"{scope}/*" for scope in scopes], *([] if scopes else [last])]))
    return list(patterns)


def suggesting_options(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose `TypeError` for an option that it does not have names those that it has."""
    options = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        wrong = {name: value for name, value in kwargs.items() if name not in options}
        if wrong:
            raise TypeError(f"{function.__name__}() has no option {_said(wrong, options)}")
        return function(*args, **kwargs)

    return call


def _said(wrong: Mapping[str, object], options: list[str]) -> str:
    """Name the wrong options, and how they are written now, what is near them or says the same, or all there are."""
    spellings = {name: renamed(name, value) for name, value in wrong.items()}
    unknown = [name for name, text in spellings.items() if not any(f" {option}=" in text for option in options)]
    sentences = [text for name, text in spellings.items() if name not in unknown]
    ours = {name: [option for option in _OURS.get(name, ()) if option in options] for name in unknown}
    alike = [similar for name in unknown for similar in (ours[name] or near(name, options, cutoff=_NEAR_OPTION))[:1]]
    sentences += [f"Did you mean {', '.join(f'{name}=' for name in dict.fromkeys(alike))}?"] if alike else []
    sentences += dict.fromkeys(_ELSEWHERE[name] for name in wrong if name in _ELSEWHERE)
    names = ", ".join(f"{name}=" for name in wrong)
    return f"{names}. {' '.join(sentences) or 'It has ' + ', '.join(f'{name}=' for name in options[1:]) + '.'}"
