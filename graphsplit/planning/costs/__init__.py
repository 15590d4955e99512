"""Costs: what machines can do, and what an operation or a copy takes on them."""
