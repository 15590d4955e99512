"""The options of transpiling, in one place, checked as far as they can be without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphsplit.api.options import DevicesLike, Options, Split, check_flag, check_strict
from graphsplit.core.devices import names_of_devices, short_name
from graphsplit.core.gpus import count_gpus
from graphsplit.core.progress import quiet
from graphsplit.errors import ArgumentError


@dataclass(frozen=True)
class TranspileOptions:
    """What is asked of a transpilation; of a SavedModel's and of a graph's.

    Attributes:
      devices: how many, or their names; the first is the default device.
      split: an axis, None, or a mapping from inputs to those.
      strict: whether work on the batch on one device is an error.
      signatures: of a SavedModel, which ones; None for all.
      overwrite: whether a SavedModel or graph in the way is replaced.
      replicate_weights: of a SavedModel, whether every device holds a copy of the weights.
      progress: called with what is being done.
      names: the full names of the devices.

    Raises:
      ArgumentError: for values of another kind.
    """

    devices: DevicesLike = None
    split: Split = 0
    strict: bool = False
    signatures: Sequence[str] | None = None
    overwrite: bool = False
    replicate_weights: bool = False
    progress: Callable[[str], None] = quiet
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_strict(self.strict)
        for name in ("overwrite", "replicate_weights"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.split, Mapping) and (
            isinstance(self.split, bool) or not isinstance(self.split, (int, type(None)))
        ):
            raise ArgumentError(
                f"split takes an axis, None, or a mapping from argument names to those, got {self.split!r}."
            )
        if self.signatures is not None:
            object.__setattr__(self, "signatures", names_in(self.signatures, "signatures", "names of signatures"))
        if not callable(self.progress):
            raise ArgumentError(f"progress takes a function of a text, got {self.progress!r}.")
        object.__setattr__(self, "names", names_of_devices(self.devices))

    @property
    def note_on_devices(self) -> str:
        """What to know where a number of devices means CPU devices, in terms of the command line; else ""."""
        if not isinstance(self.devices, int) or count_gpus():
            return ""
        gpus = ",".join(f"GPU:{i}" for i in range(len(self.names)))
        return (
            f"this machine has no GPU, so the model asks for {', '.join(map(short_name, self.names))} from now on, "
            f"wherever it is loaded; for a server with GPUs name them: --devices {gpus}"
        )

    def for_arguments(self, names: Iterable[str]) -> Options:
        """Return the options for planning something with arguments of these names; `strict` is checked after that."""
        argument_names = set(names)
        split = self.split
        if isinstance(split, Mapping):
            split = {name: axis for name, axis in split.items() if name in argument_names}
        return Options(split=split)


def names_in(value: Any, argument: str, what: str) -> tuple[str, ...]:
    """Return a name or several as a tuple, or raise `ArgumentError`."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{argument} takes {what}, got {value!r}.")
    return tuple(names)


def path_in(value: Any, argument: str) -> str:
    """Return a path as text, or raise `ArgumentError`."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ArgumentError(f"{argument} takes a path, got {value!r}.")
    return os.fspath(value)
