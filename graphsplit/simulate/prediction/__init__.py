"""What a step takes: a plan and a machine -> seconds and bytes, without running or emitting it."""
