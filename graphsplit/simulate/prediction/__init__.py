"""What a step takes on a machine.

What enters: a plan and a machine. What leaves: seconds and bytes, without running or emitting the plan.
"""
