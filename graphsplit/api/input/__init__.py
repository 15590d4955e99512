"""Input: read by the host that uses it, and sent ahead."""
