"""Forms: how values came about, as nested tuples: what an emitted graph did and what its plan says, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphsplit.core.hosts import host_name
from graphsplit.planning.gateways import Gateways

Form = tuple[Any, ...]
"""How a value came about: `("made", tensor, shard)`, `("SplitV", device, form, number)`, `("AddN", device, forms)`."""

_REDUCTIONS = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "all": "LogicalAnd", "any": "LogicalOr"}


def sent(form: Form, device: str, gateways: Gateways) -> Form:
    """Return a value as a device gets it: through its host's gateway, if it has one."""
    gateway = gateways.get(host_name(device))
    return form if gateway is None else ("Identity", gateway, (form,))


def reduced(reduction: str, by_turns: Sequence[tuple[str, Sequence[Form]]], device: str, gateways: Gateways) -> Form:
    """Return what parts amount to.

    Those of shards that take turns are reduced one by one, where they are; then those of each host on its gateway, if
    it has one; then what is left.

    Args:
      reduction: `"sum"`, ...
      by_turns: the parts of each device.
      device: where the result is wanted.
      gateways: see `find_gateways`.
    """
    together: dict[object, list[Form]] = {}
    for number, (own, parts) in enumerate(by_turns):
        host = host_name(own)
        form = _one_by_one(_REDUCTIONS.get(reduction, "AddN"), parts, own)
        together.setdefault(host if host in gateways else number, []).append(form)
    sums = [_at_once(reduction, forms, gateways.get(str(host), "")) for host, forms in together.items()]
    form = _at_once(reduction, sums, device)
    return ("RealDiv", device, form) if reduction == "mean" else form


def _at_once(reduction: str, forms: Sequence[Form], device: str) -> Form:
    if reduction in ("sum", "mean") and len(forms) > 1:
        return ("AddN", device, tuple(forms))
    return _one_by_one(_REDUCTIONS.get(reduction, "AddN"), forms, device)


def _one_by_one(kind: str, parts: Sequence[Form], device: str) -> Form:
    form = parts[0]
    for part in parts[1:]:
        form = (kind, device, (form, part))
    return form
