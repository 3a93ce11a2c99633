"""Which precision a configuration asks for: a name of the trainer's, or that of the mesh's own plugin. No torch."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

_PLUGIN = "Mesh3DPrecision"
# What Trainer and plugin take if nobody says anything.
_DEFAULT = "32-true"


def precision_of(cfg: DictConfig) -> str:
    """Returns the name of the precision of a run; whoever needs it to be of a kind checks that.

    Args:
        cfg: The composed configuration. ``trainer.plugins`` may hold a ``Mesh3DPrecision``, alone or in a list, with
            its name as keyword or as first argument; it counts more than ``trainer.precision``.
    """
    plugins: Any = OmegaConf.select(cfg, "trainer.plugins")
    if OmegaConf.is_config(plugins):
        plugins = OmegaConf.to_container(plugins, resolve=True)
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, dict) and str(plugin.get("_target_")).endswith(_PLUGIN):
            return str(plugin.get("precision") or next(iter(plugin.get("_args_") or [_DEFAULT])))
    return str(OmegaConf.select(cfg, "trainer.precision") or _DEFAULT)
