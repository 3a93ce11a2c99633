"""What a module, its optimizers and callbacks are told of the mesh, and agreed on, before the first step."""
