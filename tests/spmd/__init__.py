"""Tests on several gloo processes."""
