"""The pipeline axis: blocks in stages, the user's own step on each of them, torch's schedules between them."""
