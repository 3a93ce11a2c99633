"""Initial weights: recorded while a module is built on the meta device, replayed by name, cut for this rank."""
