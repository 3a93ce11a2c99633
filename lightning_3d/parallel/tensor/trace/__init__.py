"""Watching a fake run: how weights meet their inputs, and what cannot be cut."""
