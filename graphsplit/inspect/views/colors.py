"""Colours of devices, in all pictures and pages."""

from __future__ import annotations

from collections.abc import Iterable

from graphsplit.inspect.questions import natural_order

# Okabe and Ito's palette, made for colour-blind readers (jfly.uni-koeln.de/color), then Tableau's for more devices.
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a200", "#7f7f7f"),
    *("#1f77b4", "#9467bd", "#8c564b", "#17becf", "#2ca02c", "#bcbd22", "#e377c2", "#d62728"),
)


def device_colors(devices: Iterable[str]) -> dict[str, str]:
    """Return a colour for each device."""
    ordered = sorted(devices, key=natural_order)
    return {device: COLORS[i % len(COLORS)] for i, device in enumerate(ordered)}
