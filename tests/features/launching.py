"""Features of launching and configuration: compiled blocks, configuration by command line, processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from torch._dynamo.utils import counters

from tests.features.here import CUBE, MESHES, Here
from tests.features.modules import Data, Module, metrics, weights
from tests.features.table import Feature, Seen


@contextmanager
def _cheaply_compiled(here: Here) -> Iterator[None]:
    """Compiles without a C++ compiler; one device runs all as it is."""
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_default_backend("aot_eager")
    try:
        with torch.compiler.set_stance("default" if here.mesh.strategy else "force_eager"):
            yield
    finally:
        torch.compiler.set_default_backend(None)


def compiled_blocks(here: Here) -> Seen:
    with _cheaply_compiled(here):
        trainer = here.trainer()
        trainer.fit(Module(), Data(here))
        graphs = counters["stats"]["unique_graphs"]
        assert (graphs > 0) == (here.mesh.strategy is not None), f"{graphs} graphs were compiled"
        return {"metrics": metrics(trainer), "weights": weights(trainer)}


class PartsCompiled(Module):
    """Compiles its model, a block in place and a method; what torch sees of them is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].compile()
        self.net.head = torch.compile(self.net.head)
        self.net = torch.compile(self.net)


def compiled_by_user(here: Here) -> Seen:
    with _cheaply_compiled(here):
        trainer = here.trainer()
        trainer.fit(PartsCompiled(), Data(here))
        found = {name.replace("._orig_mod", ""): tensor for name, tensor in weights(trainer).items()}
        return {"metrics": metrics(trainer), "weights": found, "names": list(trainer.lightning_module.state_dict())}


def compiled_whole(here: Here) -> Seen:
    here.trainer().fit(torch.compile(Module(), backend="eager"), Data(here))
    return {}


_YAML = """
trainer:
  accelerator: cpu
  precision: 64-true
  max_epochs: 1
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


def command_line(here: Here) -> Seen:
    file = here.directory / f"{here.rank}.yaml"
    file.write_text(_YAML + yaml.safe_dump({"trainer": {"strategy": _strategy(here)}}).partition("\n")[2])
    sys.argv = ["program", f"--config={file}", f"--trainer.devices={here.mesh.world}", "--model.lr=0.02"]
    sys.argv += [f"--trainer.default_root_dir={here.directory}", "--trainer.logger=false", "--seed_everything=5"]
    # Lightning calls jsonargparse in its old way.
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
    cli = LightningCLI(Module, run=False, save_config_callback=_CountsSaving)
    cli.trainer.fit(cli.model, Data(here))
    saved = yaml.safe_load((here.directory / "config.yaml").read_text())
    if here.mesh.strategy is not None:
        assert here.mesh.strategy.items() <= saved["trainer"]["strategy"]["init_args"].items()
    return {
        "metrics": metrics(cli.trainer),
        "weights": weights(cli.trainer),
        "model": saved["model"],
        "saved": sorted(path.name for path in here.directory.glob("saved*")),
    }


class _CountsSaving(SaveConfigCallback):
    """Leaves a file whenever it is asked to save."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        (Path(trainer.default_root_dir) / f"saved by {trainer.global_rank}").touch(exist_ok=False)


def _strategy(here: Here) -> Any:
    if here.mesh.strategy is None:
        return "auto"
    return {"class_path": "lightning_3d.Mesh3DStrategy", "init_args": dict(here.mesh.strategy)}


FEATURES: tuple[Feature, ...] = (
    Feature(
        name="torch.compile of the whole LightningModule",
        program=compiled_whole,
        refused={mesh.name: r"was compiled as a whole.*(?s:.*)Mesh3DStrategy\(compile=True\)" for mesh in MESHES},
        note="compile=True compiles its blocks",
    ),
    Feature(name="LightningCLI, strategy from YAML", program=command_line),
    Feature(name="torch.compile of parts of the module", program=compiled_by_user),
    Feature(name="Mesh3DStrategy(compile=True)", program=compiled_blocks, always=(CUBE,), options={"compile": True}),
)
