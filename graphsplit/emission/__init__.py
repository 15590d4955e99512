"""From a plan to nodes that each name their device. Decides nothing."""
