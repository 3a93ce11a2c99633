"""How parameters read while a step runs, and how their gradients arrive."""
