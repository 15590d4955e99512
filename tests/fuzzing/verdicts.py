"""What can become of a program. (Without TensorFlow, for the process that only counts.)"""

from __future__ import annotations

import re
from dataclasses import dataclass

EQUAL, DIFFERENT, RAISED = "equal", "different", "raised"
NOT_TRACEABLE, UNSTABLE, REFUSED = "not traceable", "unstable", "refused"
KINDS = (EQUAL, NOT_TRACEABLE, UNSTABLE, REFUSED, DIFFERENT, RAISED)


@dataclass(frozen=True)
class Verdict:
    """What became of a program, and why.

    Attributes:
      kind: `equal`; `not traceable`: TensorFlow itself cannot run it; `unstable`: roundings decide what it returns;
        `refused`: graphsplit says that it does not do this; `different` and `raised`: it broke the law.
    """

    kind: str
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in (DIFFERENT, RAISED)

    @property
    def has_no_gradient(self) -> bool:
        """Whether TensorFlow knows no gradient of one of its ops."""
        return self.kind == NOT_TRACEABLE and self.message.startswith("LookupError")

    def is_like(self, other: Verdict) -> bool:
        """Return whether both say the same up to names and numbers."""
        return self.kind == other.kind and (self.kind == DIFFERENT or _gist(self.message) == _gist(other.message))


def _gist(message: str) -> str:
    """Return an error without names and numbers."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\{\{.*?\}\}|[\d\W_]+", " ", message.split("\n")[0])[:80]
