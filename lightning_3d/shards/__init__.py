"""Tensors that show global shapes over a local shard, what operations do to them, and the group they are cut over."""
