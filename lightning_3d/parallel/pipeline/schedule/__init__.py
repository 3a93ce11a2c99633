"""The schedules of torch.distributed.pipelining: made for the shapes of a step, kept, and shown."""
