"""Programs that take minutes and write pages: checkpoints from every mesh to every other one, and what kills a run."""
