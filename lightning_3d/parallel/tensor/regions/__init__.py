"""Local regions: modules that run on local weights, such as experts."""
