"""What `memory=` and `plan="auto"` chose for a function. `graphsplit.simulate.search` chooses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Choices:
    """What was chosen for a function.

    Attributes:
      made: a `Choice` of the search, by arguments.
      changes: how often layouts of variables had changed by then; what was chosen before counts no more.
      ran: the last one that ran.
    """

    made: dict[Hashable, Any] = field(default_factory=dict)
    changes: int = 0
    ran: Any = None
