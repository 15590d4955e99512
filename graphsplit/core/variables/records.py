"""What is noted of users' variables, in one attribute: how each was asked to lie, what it is called, its parts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphsplit.core.layouts import Cut, MeshDivision, Replicate, cut_in, in_groups


@dataclass(frozen=True)
class Lying:
    """How a variable lies, or is to lie, and how that was asked for.

    Attributes:
      division: how it is several; None for an ordinary variable.
      layout, over: see `VariableParts`.
      stays: the layout, one of `PLACES`, by which an ordinary variable is whole on its own device; "" for none.
      wish: layout, devices, mesh, and whether it is gathered again, if a layout was set; for slots yet to be made.
      automatic: the layout, if nobody asked for it.
      units: see `LayoutOnMesh`.
      stage: the devices of the stage to which it belongs.
    """

    division: MeshDivision | None = None
    layout: Any = "home"
    over: tuple[str, ...] = ()
    stays: Any = ""
    wish: tuple[Any, ...] | None = None
    automatic: Any = ""
    units: Mapping[tuple[str, int], Any] = field(default_factory=dict)
    stage: tuple[str, ...] = ()

    @property
    def cut(self) -> Cut | None:
        """How it is cut, in each group of devices."""
        cut = None if self.division is None else cut_in(self.division)
        return cut if isinstance(cut, Cut) else None

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """See `VariableParts`."""
        return () if self.cut is None else self.cut.groups

    @property
    def named(self) -> Any:
        """The layout that it has, as users call it."""
        return self.stays or "home" if self.division is None else self.layout

    @property
    def has_layout(self) -> bool:
        """Whether a layout was set, be it to stay where it is."""
        return self.division is not None or self.wish is not None

    @property
    def reshards(self) -> bool:
        """See `VariableParts`."""
        return self.division is not None and not isinstance(self.division, Replicate) and self.division.reshard

    def resharding(self, after_forward: bool) -> Lying:
        """Return the same, but whether what is sharded is dropped after the forward pass."""
        if self.cut is None or self.cut.reshard == after_forward:
            return self
        return replace(self, division=in_groups(replace(self.cut, reshard=after_forward)))


@dataclass
class Record:
    """What is noted of a variable.

    Attributes:
      lying: how it was asked to lie; how it does, see `lying_now`.
      parts: its `VariableParts`, if it is several; None for an ordinary variable.
      path: the name under which users know it, with its layer; "" for the one that it has itself.
      waiting: what it waits for, if it has no value yet; see `let_wait`.
      writing: graphs of functions that may write it, also since other layouts.
      taking: graphs of functions whose argument it is.
      resources: variables whose resources live as long as it does: it has that of one of them, see `move_variable`.
    """

    lying: Lying = field(default_factory=Lying)
    parts: Any = None
    path: str = ""
    waiting: Any = None
    writing: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    taking: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    resources: tuple[Any, ...] = ()


def record_of(variable: Any) -> Record:
    """Return what is noted of a variable, to be changed."""
    if (record := noted_of(variable)) is None:
        record = variable._graphsplit_record = Record()
    return record


def noted_of(variable: Any) -> Record | None:
    """Return what is noted of a variable, or of anything else; None if nothing is."""
    return getattr(variable, "_graphsplit_record", None)


def call_by_path(variable: Any, path: str) -> None:
    """Note under which name users know a variable: with its layer, as Keras calls it."""
    record_of(variable).path = path
