"""Features of batches: their structures and lengths, normalisation over them, and values of all data ranks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BatchEncoding

from tests.features.here import Here
from tests.features.modules import WIDTH, Block, Data, Module, Samples, metrics, weights
from tests.features.table import Feature, Seen

# ---- structures ----

Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Labelled:
    """A batch as a dataclass."""

    inputs: Tensor
    targets: Tensor
    names: list[str]


def as_dict(inputs: Tensor, targets: Tensor) -> Any:
    names = [f"sample {target}" for target in targets.tolist()]
    return {"x": inputs, "y": targets, "names": names, "nothing": None, "scale": 0.5, "kind": "train"}


def as_encoding(inputs: Tensor, targets: Tensor) -> Any:
    return BatchEncoding({"x": inputs, "y": targets})


def as_named(inputs: Tensor, targets: Tensor) -> Any:
    return Pair(inputs, targets)


def as_dataclass(inputs: Tensor, targets: Tensor) -> Any:
    return Labelled(inputs, targets, ["a"] * len(targets))


def as_lists(inputs: Tensor, targets: Tensor) -> Any:
    return [[inputs], {"more": (targets, ["text"] * len(targets))}]


class Unpacks(Module):
    """Takes batches of every structure."""

    def loss(self, batch: Any) -> Tensor:
        match batch:
            case Pair(inputs, targets) | Labelled(inputs, targets):
                return super().loss((inputs, targets))
            case BatchEncoding():
                return super().loss((batch["x"], batch.y))
            case {"x": inputs, "y": targets, "names": names, "nothing": None, "scale": scale, "kind": "train"}:
                assert names == [f"sample {target}" for target in targets.tolist()]
                scaled: Tensor = scale * super().loss((inputs, targets))
                return scaled
            case [[inputs], {"more": (targets, texts)}]:
                assert len(texts) == len(targets) == len(inputs)
                return super().loss((inputs, targets))
        raise AssertionError(type(batch))


class Collates:
    """Makes batches of a structure.

    Args:
        structure: Packs inputs and targets.
    """

    def __init__(self, structure: Callable[[Tensor, Tensor], Any]) -> None:
        self.structure = structure

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return self.structure(torch.stack(inputs), torch.stack(targets))


def _structured(here: Here, structure: Callable[[Tensor, Tensor], Any]) -> Seen:
    L.seed_everything(5, verbose=False)
    trainer, collate = here.trainer(), Collates(structure)
    train = here.loader(Samples(24), 8, collate_fn=collate)
    trainer.fit(Unpacks(), train, here.loader(Samples(12), 8, collate_fn=collate))
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


def dicts(here: Here) -> Seen:
    return {"dict": _structured(here, as_dict), "encoding": _structured(here, as_encoding)}


def other_structures(here: Here) -> Seen:
    return {each.__name__: _structured(here, each) for each in (as_named, as_dataclass, as_lists)}


# ---- lengths ----


class Texts(Dataset[Tensor]):
    """Texts of different lengths."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
        self.texts = [torch.randint(0, 20, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def pad(texts: list[Tensor]) -> dict[str, Tensor]:
    """Returns texts and labels as long as the longest; padding has no label."""
    words = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"words": words, "labels": nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)}


class Language(L.LightningModule):
    """Says each word again; a batch counts as much as it has words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 20)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean over all words."""
        hidden = self.words(batch["words"])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        words = int((batch["labels"] >= 0).sum())
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=words)
        return {"loss": loss, "loss_weight": words}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        words = int((batch["labels"] >= 0).sum())
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=words)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def padded(here: Here) -> Seen:
    trainer = here.trainer(max_epochs=2)
    trainer.fit(
        Language(),
        here.loader(Texts(24), 8, shuffle=True, collate_fn=pad),
        here.loader(Texts(13), 8, collate_fn=pad),
    )
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


# ---- normalisation ----


class Normalises(Module):
    """Batch normalisation in front of the blocks, in them and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        for block in self.net.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.net.first(self.before(inputs))
        for block in self.net.blocks:
            hidden = block(hidden)
        logits: Tensor = self.net.head(self.behind(hidden))
        return logits

    def configure_optimizers(self) -> Any:
        # What is added before a normalisation has no gradient but rounding, which Adam would make large.
        return torch.optim.SGD(self.parameters(), lr=0.1)


def synchronised_batchnorm(here: Here) -> Seen:
    trainer = here.trainer(sync_batchnorm=True, max_epochs=2)
    module = Normalises()
    trainer.fit(module, Data(here, samples=28))
    return {
        "metrics": metrics(trainer),
        "weights": weights(trainer),
        "kind": type(module.before).__name__,
    }


# ---- values of all data ranks ----


class Gathers(Module):
    """Asks for the values of all data ranks, with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        gathered = self.all_gather(loss, sync_grads=True)
        assert isinstance(gathered, Tensor)
        return gathered.mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        found: Any = self.all_gather({"numbers": batch[0][:, 0]})
        self.seen += found["numbers"].flatten().tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        value: Any = self.all_gather(torch.tensor(float(self.global_step)))
        self.validated += sorted(set(value.flatten().tolist()))


def gathered(here: Here) -> Seen:
    trainer, module = here.trainer(max_epochs=2), Gathers()
    trainer.fit(module, Data(here))
    return {
        "metrics": metrics(trainer),
        "weights": weights(trainer),
        "seen": module.seen,
        "validated": module.validated,
    }


FEATURES: tuple[Feature, ...] = (
    Feature(name="batches as dicts, with texts and None", program=dicts),
    Feature(name="batches as named tuples, dataclasses, nested lists", program=other_structures),
    Feature(name="padded texts of changing lengths", program=padded),
    Feature(
        name="sync_batchnorm",
        program=synchronised_batchnorm,
        options={"num_microbatches": 1},
        note="Statistics are of one micro-batch on all data ranks.",
    ),
    Feature(name="self.all_gather", program=gathered),
)
