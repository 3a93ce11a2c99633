"""Blocks that are recorded once for each kind of input and then replayed as straight-line code on plain tensors."""
