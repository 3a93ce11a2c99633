"""Ranks that do not run the same program, or not on the same data: one error on all of them, and nobody waits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.strategy.setup.program import disagreement, facts_of
from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import SpmdError, run_spmd

PIPELINE, TENSOR, DATA = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}, {"zero_stage": 2}
_CODE = """
from tests.features.modules import Module

class FromFile(Module):
    note = {rank}
"""


class Deeper(Module):
    """Has a layer more where it is told so."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        if more:
            self.more = torch.nn.Linear(2, 2)


def from_file(directory: Path, rank: int) -> L.LightningModule:
    """Returns a module whose class is in a file that each rank has another version of."""
    place = directory / f"node-{rank}"
    place.mkdir()
    (place / "net.py").write_text(_CODE.format(rank=rank))
    spec = importlib.util.spec_from_file_location("net_of_a_user", place / "net.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found.FromFile()


def differ(rank: int, world: int, what: str, strategy: dict[str, Any], directory: Path) -> None:
    L.seed_everything(5 + (what == "seed" and rank), verbose=False)
    options = dict(strategy)
    samples, batch_size = 16, 4
    module: L.LightningModule = Module()
    if what == "option" and rank == 1:
        options["num_microbatches"] = 4
    if what == "code":
        module = from_file(directory, rank)
    if what == "module":
        module = Deeper(rank == 1)
    if what == "batches" and rank == 1:
        samples = 12
    if what == "shapes" and rank == 1:
        samples, batch_size = 8, 2
    run = trainer(world, strategy=options, max_epochs=1, precision="64-true", num_sanity_val_steps=0)
    run.fit(module, DataLoader(Samples(samples), batch_size=batch_size), DataLoader(Samples(8), batch_size=4))


@pytest.mark.spmd
@pytest.mark.parametrize(
    ("what", "strategy", "text"),
    [
        ("seed", DATA, "seed_everything: 5 on rank 0; 6 on rank 1"),
        more("option", PIPELINE, "strategy.num_microbatches: 'auto' on rank 0; 4 on rank 1"),
        more("code", TENSOR, "code of FromFile in net.py: "),
        ("module", DATA, "'more.weight' is not there on rank 0, (2, 2) torch.float64 on rank 1"),
        more("module", PIPELINE, "'more.weight' is not there on rank 0, (2, 2) torch.float64 on rank 1"),
        ("batches", PIPELINE, "differ: the train loader has 4 batches on rank 0, 3 batches on rank 1."),
        ("shapes", TENSOR, "the first batch is (4, 8) of torch.float64, (4,) of torch.int64 on rank 0, (2, 8) of"),
    ],
)
def test_what_differs_is_named_on_every_rank(what: str, strategy: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(SpmdError) as caught:
        run_spmd(differ, 2, what, strategy, tmp_path, timeout=90)
    reports = caught.value.reports
    assert len(reports) == 2
    assert all(text in report for report in reports.values()), reports


def test_one_error_names_everything_that_differs() -> None:
    same = {"torch": "2", "seed_everything": "5", "code of Net in net.py": "abc"}
    found = str(disagreement([same, {**same, "torch": "3"}, {"torch": "3", "seed_everything": "5"}]))
    assert "torch: 2 on rank 0; 3 on ranks 1-2" in found
    assert "code of Net in net.py: abc on ranks 0-1; not there on rank 2" in found
    assert "seed_everything" not in found


def test_code_is_that_of_all_modules_and_not_of_packages() -> None:
    class Net(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)

    facts = facts_of(StrategyConfig(), Net())
    code = [name for name in facts if name.startswith("code of ")]
    assert any(name.endswith("Net in test_same_program.py") for name in code)
    assert "code of Block in modules.py" in code
    assert not any("Linear" in name or "LightningModule" in name for name in code)
    assert facts["strategy.zero_stage"] == "1"
    assert "strategy.explain" not in facts
