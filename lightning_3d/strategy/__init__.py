"""The strategy: Lightning's hooks, each calling down to the floors below."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.strategy.mesh_3d import Mesh3DStrategy

__all__ = ["Mesh3DStrategy"]

if Mesh3DStrategy.strategy_name not in StrategyRegistry:
    Mesh3DStrategy.register_strategies(StrategyRegistry)
