"""Logged values, metrics and reductions: equal on all ranks, and to one device."""
