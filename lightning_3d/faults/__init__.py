"""Faults: a rank that fails or vanishes ends all others soon, and each of them says which one it was.

`report` is what is said, `hub` hears from all ranks on rank 0, `watch` is what every rank has of it,
`agent` is what torchrun is told.
"""
