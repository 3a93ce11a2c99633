"""A batch on its way through a step: cut into micro-batches, run, joined and weighed."""
