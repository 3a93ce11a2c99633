"""One room for each dimension of parallelism: what (plan), how (apply), price (cost)."""
