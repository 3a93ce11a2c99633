"""Modules of many kinds on the tensor axis: frozen, adapted, convolutional, torch's and Lightning's own, made late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from tests.parity.models import VOCABULARY, Classifier, NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader, normal
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, Scenario, seen_alike, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]


# ---- parts that do not train ----


def frozen(ranks: Ranks) -> Any:
    module = NextToken(PackedGPT())
    for part in (module.model.blocks[0], module.model.norm, module.model.tokens, module.model.blocks[1].mlp[2]):
        part.requires_grad_(False)
    return ranks.fit(module, loader(tokens(3)))


class Adapter(nn.Module):
    """Two small trained matrices beside a frozen linear layer, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + 0.5 * self.up(self.down(hidden))


class Adapted(NextToken):
    def __init__(self) -> None:
        super().__init__(PackedGPT())
        self.model.requires_grad_(False)
        for block in self.model.blocks:
            block.attention.pack = Adapter(block.attention.pack)
            block.attention.out = Adapter(block.attention.out)
            block.mlp[0] = Adapter(block.mlp[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def adapted(ranks: Ranks) -> Any:
    return ranks.fit(Adapted(), loader(tokens(3)), gradient_clip_val=0.5)


# ---- convolutions and running statistics ----


class Images(nn.Module):
    """A convolutional stem with batch normalisation before a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3))
        self.body = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images).mean(dim=(-1, -2))
        return self.head(hidden + self.body(hidden))


class ClassifiesImages(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def convolutions(ranks: Ranks) -> Any:
    targets = torch.tensor([0, 1, 4, 2])
    batches = [(normal(seed, 4, 3, 8, 8), targets) for seed in range(4)]
    module = ClassifiesImages(Images())
    record = ranks.fit(module, loader(batches), loader(batches[:2]))
    statistics = {name: value.clone() for name, value in module.named_buffers() if "mean" in name or "var" in name}
    return record, {name: value for name, value in statistics.items() if "stem" in name}


# ---- attention of torch ----


class Crossed(nn.Module):
    """Cross-attention over another width, with and without weights, in both layouts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True)
        self.second = nn.MultiheadAttention(16, 2, dropout=0.1, add_bias_kv=True)
        self.head = nn.Linear(16, 5)
        for attention in (self.first, self.second):
            # A key's bias changes nothing, so it is noise where it begins as zero.
            nn.init.normal_(attention.in_proj_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        queries, keys = inputs[:, :5], inputs[..., :12]
        masked = torch.zeros(keys.shape[:2], dtype=torch.bool)
        masked[:, -1] = True
        mixed, weights = self.first(queries, keys, keys, key_padding_mask=masked)
        hidden = (queries + mixed).transpose(0, 1)
        hidden = hidden + self.second(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden.mean(dim=0)) + weights.square().mean()


def crossed(ranks: Ranks) -> Any:
    targets = torch.tensor([0, 1, 4, 2])
    return ranks.fit(Classifier(Crossed()), loader([(normal(seed, 4, 7, 16), targets) for seed in range(3)]))


# ---- Lightning's demos ----


class Demo(LightningTransformer):
    """Lightning's demo, small, with a name for its loss."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY)

    def prepare_data(self) -> None:
        """It would download a text."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def demo(ranks: Ranks) -> Any:
    pairs = [(ids, ids.flip(-1)) for (ids,) in tokens(3)]
    return ranks.fit(Demo(), loader(pairs))


# ---- made in configure_model ----


class MadeLate(NextToken):
    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            self.model = PackedGPT()


def made_late(ranks: Ranks) -> Any:
    return ranks.fit(MadeLate(), loader(tokens(3)))


SCENARIOS: tuple[Scenario, ...] = (frozen, adapted, convolutions, crossed, demo, made_late)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_as_on_one_device(scenario: Scenario) -> None:
    seen_alike(scenario)


class MadeLateWithoutNoise(MadeLate):
    """Each data rank has masks of its own, and these see the same samples."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            block.mlp[3].p = 0.0


def made_late_on_ranks_with_equal_samples(ranks: Ranks) -> Any:
    return ranks.fit(MadeLateWithoutNoise(), loader(tokens(3)), use_distributed_sampler=False)


def test_made_late_beside_the_data_axis() -> None:
    seen_alike(made_late_on_ranks_with_equal_samples, 4, tensor_parallel_size=2, zero_stage=3)


def nothing_to_cut(rank: int, world: int) -> str:
    with pytest.raises(PlanError) as caught:
        Ranks(world=world, strategy={"tensor_parallel_size": world}).trainer().fit(Unnamed())
    return str(caught.value)


class Unnamed(BoringModel):
    pass


def test_nothing_to_cut() -> None:
    for text in run_spmd(nothing_to_cut, 3):
        assert "tensor_parallel_size=3: no parameter of the model can be cut" in text, text
        assert "layer.weight" in text, text
