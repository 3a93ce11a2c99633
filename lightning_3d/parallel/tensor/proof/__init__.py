"""The numerical proof of a plan, on ranks that are threads."""
