"""What became of calls and tests, as lines of JSON between processes. (Without TensorFlow, for the one that counts.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.fuzzing.verdicts import DIFFERENT, EQUAL, NOT_TRACEABLE, RAISED, REFUSED, UNSTABLE

GRAPH_DIFFERS = "tf.function differs"
KINDS = (EQUAL, UNSTABLE, NOT_TRACEABLE, GRAPH_DIFFERS, REFUSED, DIFFERENT, RAISED)


@dataclass
class Calls:
    """What became of the calls of one test.

    Attributes:
      kinds: how many calls were `equal`; `unstable` (rounding decides what they return); `not traceable`
        or `tf.function differs` (TensorFlow itself does not run them in a graph, or runs them otherwise than eagerly);
        `refused` (graphsplit says that it does not do this); `different` or `raised`.
      messages: "kind: call: what was wrong" of those that are not equal.
      not_routed: why how many calls ran without graphsplit.
      with_rows: how many of the programs had a batch of at least two rows.
      sharded: how many of these computed something on several devices.
      at_home: "op type: reason" of what carried rows and ran at home, and how many calls had it.
    """

    OURS: ClassVar = frozenset({DIFFERENT, RAISED})  # these kinds break the law

    kinds: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    not_routed: Counter[str] = field(default_factory=Counter)
    with_rows: int = 0
    sharded: int = 0
    at_home: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, what: str, message: str = "") -> None:
        """Count a call."""
        self.kinds[kind] += 1
        if message:
            self.messages.append(f"{kind}: {what}: {message}")

    def broken(self) -> list[str]:
        """Return what breaks the law."""
        return [message for message in self.messages if message.split(":")[0] in self.OURS]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return dict(vars(self))

    @classmethod
    def total(cls, found: Iterable[dict[str, Any]]) -> Calls:
        """Return the sum of what `as_json` gave."""
        whole = cls()
        for one in found:
            whole.kinds.update(one["kinds"])
            whole.messages += one["messages"]
            whole.not_routed.update(one["not_routed"])
            whole.with_rows += one["with_rows"]
            whole.sharded += one["sharded"]
            whole.at_home.update(one["at_home"])
        return whole
