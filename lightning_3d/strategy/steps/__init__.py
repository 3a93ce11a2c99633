"""What runs a batch: whole, in micro-batches, or through a pipeline."""
