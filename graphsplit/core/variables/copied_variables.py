"""Variables with copies: one on each of several devices, of which the variable itself is one.

A parallelized function writes all copies, so the variable is right at any moment for whoever reads it. Whoever asks for
its handle otherwise may write it: then the other copies are made again before the next parallelized call, and nobody
reads them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.layouts import Replicate
from graphsplit.core.variables.parted_classes import waiting_of
from graphsplit.core.variables.parted_variables import VariableParts, assign, is_initialized, read_handle
from graphsplit.core.variables.running_calls import calls


class VariableCopies(VariableParts):
    """The copies of one variable.

    Attributes:
      in_parts: whether all copies hold the value, or only the variable itself.
    """

    def __init__(self, variable: tf.Variable, copied: Replicate):
        super().__init__(variable, copied, "replicated")

    def _new_part(self, part: int) -> Any:
        is_itself = self.devices[part] == canonical_name(self._own.device)
        return _Itself(self._own) if is_itself else super()._new_part(part)

    def _ask(self, only_read: bool) -> None:
        if waiting_of(self.variable) is not None:
            self._check_has_value()
        if not only_read:
            self.put_together()

    def _how(self) -> str:
        return f"replicated on {', '.join(map(short_name, self.devices))}"

    def _take_apart(self) -> None:
        if not is_initialized(self._own):  # a new variable: it takes its value, and then the copies do
            return
        value = read_handle(self._own, self._dtype)
        for part in self._parts:
            if not isinstance(part, _Itself):
                with tf.device(part.handle.device):
                    assign(part.handle, tf.identity(value))
        self.in_parts = True

    def take(self, value: Any) -> bool:  # noqa: ARG002
        """Return that the variable itself takes any value, as one of the copies: the others are old from now on."""
        if tf.executing_eagerly():
            self.put_together()
        return False

    def fill(self, make: Callable[[Sequence[int]], tf.Tensor]) -> bool:  # noqa: ARG002
        """Return that the variable itself takes the value, as with `take`."""
        return False

    def on_host(self) -> None:
        """Return None: the variable itself is read."""

    def as_array(self) -> None:
        """Return None, as `on_host`."""

    def put_together(self) -> None:
        """Let only the variable itself hold the value: the copies may be old from now on."""
        with calls.lock:
            calls.moves += self.in_parts
            self._put_together()

    def _put_together(self) -> None:
        self.in_parts = False

    def _handles(self) -> Sequence[tf.Tensor]:
        return [part.handle for part in self._parts]


class _Itself:
    """The copy that is the variable itself."""

    def __init__(self, handle: tf.Tensor):
        self.handle = handle
