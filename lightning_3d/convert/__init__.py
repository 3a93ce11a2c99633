"""``lightning-3d convert``: checkpoints in other forms."""

from lightning_3d.convert.command import run

__all__ = ["run"]
