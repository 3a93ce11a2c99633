"""``python -m lightning_3d``: the same as the command ``lightning-3d``."""

from __future__ import annotations

import sys

from lightning_3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
