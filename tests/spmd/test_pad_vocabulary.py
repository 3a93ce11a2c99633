"""A vocabulary of 97 through the Trainer, on two and four tensor-parallel ranks: as on one device, and no padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.marks import more
from tests.spmd.fits import QUIET, loader
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

V, WIDTH, STEPS = 97, 16, 3


class Words(L.LightningModule):
    """A tied head, and one of its own with a bias, that have the vocabulary's size written into their use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(V, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.tied, self.own = nn.Linear(WIDTH, V, bias=False), nn.Linear(WIDTH, V)
        self.tied.weight = self.words.weight
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        x = self.words(ids)
        x = x + self.down(F.gelu(self.up(x)))
        loss = torch.zeros((), dtype=x.dtype)
        for head in (self.tied, self.own):
            logits = head(x)
            assert logits.shape == (*ids.shape, V)
            loss = loss + F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].flatten())
            self.seen.append(logits.argmax(-1).sum().item())
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def fit(rank: int, world: int, saved: Path, source: Path | None, distributed: bool) -> list[Any]:
    """Trains one more epoch, from a checkpoint if there is one, and saves."""
    degree = {"tensor_parallel_size": world, "pad_vocabulary": True} if world > 1 else {}
    module = Words()
    generator = torch.Generator().manual_seed(7)
    batches = [(torch.randint(V, (2, 9), generator=generator),) for _ in range(STEPS)]
    trainer = L.Trainer(
        **QUIET,
        devices=world,
        strategy=Mesh3DStrategy(**degree, save_distributed_checkpoint=distributed),
        plugins=Mesh3DPrecision("64-true"),
        max_epochs=1 if source is None else 2,
        gradient_clip_val=0.5,
    )
    trainer.fit(module, loader(batches), ckpt_path=source)
    assert trainer.global_step == STEPS * (1 if source is None else 2)
    if world > 1:
        rows = -(-V // world)
        shapes = {name: value.to_local().shape for name, value in module.named_parameters()}
        assert shapes["words.weight"] == shapes["own.weight"] == (rows, WIDTH)
        assert shapes["own.bias"] == (rows,)
        if rank == world - 1:
            padding = rows * world - V
            for parameter in (module.words.weight, module.own.weight, module.own.bias):
                held = [parameter, *(value for value in trainer.optimizers[0].state[parameter].values() if value.dim())]
                assert not any(value.to_local()[rows - padding :].any() for value in held)
    trainer.save_checkpoint(saved)
    return module.seen


def weights(path: Path) -> dict[str, Any]:
    """Returns the weights and the moments of a file."""
    content = torch.load(path, weights_only=True)
    return {"state_dict": content["state_dict"], "moments": content["optimizer_states"][0]["state"]}


@pytest.mark.parametrize("distributed", [True, more(False)], ids=["directory", "file"])
def test_trains_saves_and_loads_as_on_one_device(tmp_path: Path, distributed: bool) -> None:
    (first,) = run_spmd(fit, 1, tmp_path / "one.ckpt", None, False)
    (second,) = run_spmd(fit, 1, tmp_path / "one_more.ckpt", tmp_path / "one.ckpt", False)
    expected = weights(tmp_path / "one_more.ckpt")

    for seen in run_spmd(fit, 2, tmp_path / "cut.ckpt", None, distributed):
        assert seen == pytest.approx(first, rel=1e-10)
    if not distributed:
        torch.testing.assert_close(
            weights(tmp_path / "cut.ckpt"), weights(tmp_path / "one.ckpt"), rtol=1e-9, atol=1e-12
        )
    for world in (1, 2, 4):
        saved = tmp_path / f"{world}.ckpt"
        for seen in run_spmd(fit, world, saved, tmp_path / "cut.ckpt", False):
            assert seen == pytest.approx(second, rel=1e-10)
        assert weights(saved)["state_dict"]["words.weight"].shape == (V, WIDTH)
        torch.testing.assert_close(weights(saved), expected, rtol=1e-9, atol=1e-12)
