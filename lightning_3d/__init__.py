"""lightning_3d."""
