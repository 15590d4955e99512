"""Between hosts once: what is small, and no move of the plan, goes to a host once, however many of its devices want it.

Numbers and truths about rows, zeros, and the signals that keep an order travel as messages of their own, and between
hosts a message takes long, whatever it carries. (What a plan moves has gateways: `planning/communication/gateways.py`.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from graphsplit.core.hosts import host_name
from graphsplit.core.protos.graphdefs import make_node, output_type, set_inputs, source_of, split_reference
from graphsplit.core.protos.node_writer import host_of
from graphsplit.emission.draft import SIZES_ROLE, Draft
from graphsplit.emission.emitted_graph import RELAY_ROLE, Origin

_SENT_ON = frozenset({SIZES_ROLE, "zero-fill"})  # roles


def relay_within_hosts(draft: Draft) -> None:
    """Let devices that want the same of another host get it, all but one, from one of their own host.

    What a node waits for on another host becomes one signal first.

    Args:
      draft: all nodes of a graph; it gets those that send on.
    """
    if len({host_name(node.device) for node in draft.nodes}) == 1:
        return
    _join_signals(draft)
    by_name = {node.name: node for node in draft.nodes}
    for (reference, _), readers in _wanted(draft).items():
        if len({reader.device for reader in readers}) == 1:
            continue
        relay, device = f"{draft.scope}/relay_{len(draft.nodes)}", readers[0].device
        if reference[0] == "^":
            node, instead = make_node(relay, "NoOp", [reference], device), f"^{relay}"
        else:
            name, index = split_reference(reference)
            dtype = tf.as_dtype(output_type(by_name[name], index))
            node, instead = make_node(relay, "Identity", [reference], host_of(device), T=dtype), relay
        for reader in readers:
            set_inputs(reader, [instead if r == reference else r for r in reader.input])
        draft.add(node, Origin(None, None, RELAY_ROLE))


def _join_signals(draft: Draft) -> None:
    """Let a node that waits for several of another host wait for one there, which waits for them."""
    joined: dict[tuple[str, ...], str] = {}
    for node in tuple(draft.nodes):
        by_host: dict[str, list[str]] = {}
        for signal in [r for r in node.input if r[0] == "^" and node.device]:
            by_host.setdefault(host_name(draft.device_of(signal[1:])), []).append(signal)
        by_host.pop(host_name(node.device), None)
        for signals in by_host.values():
            if len(signals) > 1:
                key = tuple(sorted(signals))
                if key not in joined:
                    joined[key] = f"{draft.scope}/relay_{len(draft.nodes)}"
                    own = make_node(joined[key], "NoOp", key, draft.device_of(key[0][1:]))
                    draft.add(own, Origin(None, None, RELAY_ROLE))
                set_inputs(node, [f"^{joined[key]}" if r in signals else r for r in node.input])


def _wanted(draft: Draft) -> dict[tuple[str, str], list[Any]]:
    """Return who reads, or waits for, what of other hosts that may be sent on: by reference and host."""
    found: dict[tuple[str, str], list[Any]] = {}
    hosts = {name: host_name(draft.device_of(name)) for name in draft.origins}
    small = {name for name, origin in draft.origins.items() if origin.role in _SENT_ON}
    for node in draft.nodes:
        host = hosts[node.name]
        for reference in dict.fromkeys(node.input) if node.device else ():
            source = source_of(reference)
            if (reference[0] == "^" or source in small) and hosts[source] != host:
                found.setdefault((reference, host), []).append(node)
    return found
