"""What the model is: its parameters under all their names, its stacks of blocks, and calls of its modules."""
