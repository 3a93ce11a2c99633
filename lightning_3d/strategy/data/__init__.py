"""Loaders on a mesh: who reads what, where they end, and where a run is in them."""
