"""What of Keras is replaced while `keras.distribution` is enabled, and why: all of it, and nothing else is touched.

Keras' TensorFlow backend lacks most of what `keras.distribution` asks of a backend (devices, processes, how values
lie), and its `fit` never asks for the distribution. No public name changes either. All are taken back together: see
`replace_all`. One process drives all devices.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from graphsplit.core.devices import canonical_name, names_of_devices, task_of
from graphsplit.core.keras_internals import tensorflow_distribution, tensorflow_trainer, tensorflow_variable
from graphsplit.core.tensorflow_internals import own_task
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.keras.answers import STEPS

_MISSING = object()


class Running(Protocol):
    """What runs while it is enabled."""

    def make_function(self, model: Any, kind: str, original: Callable[..., Any], force: bool) -> Any:
        """Make the function that Keras calls for each batch."""

    def says_that_it_drives_batches(self, model: Any) -> None:
        """Say, once, that a class has such a function of its own."""

    def born(self, variable: Any, value: Any) -> AbstractContextManager[None]:
        """Lay out a variable that is made in the block of an initial value."""

    def with_layout(self, tensor: Any, layout: Any) -> Any:
        """Ask that a tensor lies so."""


@dataclass(frozen=True)
class Replacement:
    """One name of Keras.

    Attributes:
      owner: returns the class or module that has it.
      name: of the attribute.
      reason: why it is replaced.
      new: returns what stands there meanwhile, from what stood there and from what runs.
      parameters: that Keras' own function has; None for what not every Keras has, and where it need not.
    """

    owner: Callable[[], Any]
    name: str
    reason: str
    new: Callable[[Any, Running], Any]
    parameters: tuple[str, ...] | None = None

    def want(self) -> str | None:
        """Return what is wrong with the Keras that is installed, None if nothing."""
        if self.parameters is None:
            return None
        owner = self.owner()
        member = vars(owner).get(self.name)
        function = member.fget if isinstance(member, property) else member
        where = f"{owner.__name__}.{self.name}"
        if function is None:
            return f"{where} is missing"
        parameters = tuple(inspect.signature(function).parameters)
        if parameters == self.parameters:
            return None
        return f"{where} takes {', '.join(parameters)} instead of {', '.join(self.parameters)}"


def _maker(kind: str) -> Callable[[Any, Running], Any]:
    def new(original: Any, running: Running) -> Any:
        @functools.wraps(original)  # keeps `__module__`, by which a class's own method is told from Keras'
        def make(self: Any, force: bool = False) -> Any:
            return running.make_function(self, kind, original, force)

        return make

    return new


def _strategy(original: Any, running: Running) -> Any:
    @functools.wraps(original.fget)
    def distribute_strategy(self: Any) -> Any:
        running.says_that_it_drives_batches(self)
        return original.fget(self)

    return property(distribute_strategy)


def _initialize(original: Any, running: Running) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, value: Any) -> None:
        with running.born(self, value):
            original(self, value)

    return initialize


def _distribute_tensor(original: Any, running: Running) -> Any:  # noqa: ARG001
    def distribute_tensor(tensor: Any, layout: Any) -> Any:  # (a layer may return several)
        return tf.nest.map_structure(lambda part: running.with_layout(part, layout), tensor)

    return distribute_tensor


def _same(function: Any) -> Callable[[Any, Running], Any]:
    return lambda original, running: function  # noqa: ARG005


_STEP = "Keras makes there what it calls for each batch, and never asks for the distribution"
_LACKS = "the TensorFlow backend has none"


def list_devices_with(original: Any) -> Any:
    """Return Keras' `list_devices`, which in a cluster gives full names: each worker's first CPU is a "cpu:0" there."""

    def list_devices(device_type: str | None = None) -> list[str]:
        if own_task() is None:
            names_of_keras: list[str] = original(device_type)
            return names_of_keras
        kind = None if device_type is None else device_type.upper()
        devices = tf.config.list_logical_devices(kind)
        accelerators = [device for device in devices if device.device_type != "CPU"] if kind is None else []
        names = [canonical_name(device.name) for device in accelerators or devices]
        return [name for name in names if task_of(name) is not None] or names  # a client has no rows to compute

    return list_devices


def get_device_count(device_type: str | None = None) -> int:
    """Return how many devices the backend lists now."""
    return len(tensorflow_distribution().list_devices(device_type))


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,  # noqa: ARG001  # (Keras' signature)
) -> None:
    """Do nothing for one process, and say what to do for several.

    Raises:
      ArgumentError: if there are so many addresses, and so many processes are not.
      UnsupportedError: for several processes.
    """
    jobs = job_addresses.split(",") if job_addresses else []
    if len(jobs) > 1 and num_processes is not None and num_processes != len(jobs):
        raise ArgumentError(f"{job_addresses!r} has {len(jobs)} jobs, but num_processes is {num_processes}.")
    if not jobs and (num_processes or 1) == 1:
        return
    processes = job_addresses or f"{num_processes} processes"
    raise UnsupportedError(
        f"keras.distribution.initialize: {processes!r} asks for a process on each machine that runs this program. With "
        "graphsplit one process uses the devices of all: start `graphsplit worker` on each machine and call "
        "graphsplit.connect([addresses]) here; keras.distribution.list_devices() then returns their devices."
    )


def num_processes() -> int:
    """Return 1: one process drives all devices, other machines' too."""
    return 1


def process_id() -> int:
    """Return 0: there is one process."""
    return 0


def distribute_value(value: Any, layout: Any) -> Any:  # noqa: ARG001
    """Return the value; the step that reads it divides it."""
    return value


def distribute_data_input(batch: Any, layout: Any, batch_dim_name: str) -> Any:  # noqa: ARG001
    """Return the batch, which is the global one; the step that reads it divides it."""
    return batch


def to_backend_device(name: str) -> str:
    """Return a device's full name."""
    return canonical_name(str(name))


def to_backend_mesh(mesh: Any) -> tuple[str, ...]:
    """Return the full names of a mesh's devices, in its order. They need not be here: there are plans of others."""
    return names_of_devices([str(name) for name in mesh.devices.flatten()])


def to_backend_layout(layout: Any) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Return the axes of a layout, and its mesh.

    Raises:
      ValueError: if it has no mesh, as Keras' other backends do.
    """
    if layout.device_mesh is None:
        raise ValueError("Cannot create sharding when device mesh is not set for TensorLayout.")
    return layout.axes, layout.device_mesh.backend_mesh


REPLACEMENTS = (
    *[
        Replacement(tensorflow_trainer, f"make_{kind}_function", _STEP, _maker(kind), ("self", "force"))
        for kind in STEPS
    ],
    Replacement(
        tensorflow_trainer,
        "distribute_strategy",
        "fit, evaluate and predict ask for it before all else: the one place that meets classes with a "
        "make_train_function of their own, which stay on one device",
        _strategy,
        ("self",),
    ),
    Replacement(
        tensorflow_variable,
        "_initialize",
        "each variable gets its value there: what a layout map cuts is laid out before it has one",
        _initialize,
        ("self", "value"),
    ),
    Replacement(
        tensorflow_distribution,
        "list_devices",
        "in a cluster it calls each worker's first CPU cpu:0",
        lambda original, running: list_devices_with(original),  # noqa: ARG005
        ("device_type",),
    ),
    Replacement(tensorflow_distribution, "get_device_count", _LACKS, _same(get_device_count)),
    Replacement(tensorflow_distribution, "initialize", _LACKS, _same(initialize)),
    Replacement(tensorflow_distribution, "num_processes", _LACKS, _same(num_processes)),
    Replacement(tensorflow_distribution, "process_id", _LACKS, _same(process_id)),
    Replacement(tensorflow_distribution, "distribute_tensor", _LACKS, _distribute_tensor),
    Replacement(tensorflow_distribution, "distribute_data_input", _LACKS, _same(distribute_data_input)),
    Replacement(tensorflow_distribution, "_to_backend_device", _LACKS, _same(to_backend_device)),
    Replacement(
        tensorflow_distribution,
        "distribute_value",
        "it returns None in place of the value",
        _same(distribute_value),
    ),
    Replacement(tensorflow_distribution, "_to_backend_mesh", "DTensor's, if any: it raises", _same(to_backend_mesh)),
    Replacement(
        tensorflow_distribution, "_to_backend_layout", "DTensor's, if any: it raises", _same(to_backend_layout)
    ),
)


def replace_all(running: Running) -> contextlib.ExitStack:
    """Replace all names, and return what gives Keras everything back when it is closed.

    Args:
      running: what runs meanwhile.

    Raises:
      UnsupportedError: for a Keras that lacks one of them, or has it otherwise. Then none is replaced.
    """
    check_keras()
    back = contextlib.ExitStack()
    for replacement in REPLACEMENTS:
        owner, name = replacement.owner(), replacement.name
        original = vars(owner).get(name, _MISSING)
        back.callback(*((delattr, owner, name) if original is _MISSING else (setattr, owner, name, original)))
        setattr(owner, name, replacement.new(original, running))
    return back


def check_keras() -> None:
    """Raise `UnsupportedError` unless the Keras that is installed is one whose names can be replaced."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"Keras runs on {keras.backend.backend()!r} here, which has a keras.distribution of its own. On TensorFlow "
            "it needs gs.keras.enable_distribution: set the environment variable KERAS_BACKEND=tensorflow before Keras "
            "is imported."
        )
    numbers = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if numbers < (3, 3):
        wrong = ["it is older"]
    elif numbers > (3, 15):
        wrong = ["it is newer"]  # (3.16 has other classes there)
    else:
        wrong = [want for replacement in REPLACEMENTS if (want := replacement.want()) is not None]
    if wrong:
        raise UnsupportedError(
            f"keras.distribution on TensorFlow is there for Keras 3.3 to 3.15, and this is {keras.__version__}:\n"
            f"{bullet_list(wrong)}\nInstall one of those, or use multi_gpu_model, which needs none of this."
        )
