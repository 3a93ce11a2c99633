from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler

from lightning_3d.reference import TextDataModule
from tests.unit.reference.conftest import DataFactory

TEXT = "".join(f"line {n:03d} of text\n" for n in range(200)).encode()


def on_data_rank(data: TextDataModule, rank: int, replicas: int) -> TextDataModule:
    kwargs = {"num_replicas": replicas, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=kwargs)  # type: ignore[assignment]
    return data


def test_windows_cover_the_text_without_overlap(make_data: DataFactory) -> None:
    data = make_data(batch_size=1)
    data.setup("fit")
    rows = [*data.train_dataloader().dataset, *data.val_dataloader().dataset, *data.test_dataloader().dataset]
    assert all(row.shape == (64,) and row.dtype == torch.int64 for row in rows)
    assert bytes(torch.cat(rows).byte()) == TEXT[: 53 * 64]
    assert torch.equal(data.train_dataloader().dataset[-1], rows[42])
    assert [len(loader) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())] == [
        43,
        5,
        5,
    ]
    assert data.vocab_size == 257


def test_batches_are_token_ids_of_one_more_than_the_length(make_data: DataFactory) -> None:
    data = make_data()
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert [batch.shape for batch in batches] == [(8, 64)] * 6
    assert [batch.shape for batch in data.val_dataloader()] == [(5, 64)]


def test_lightning_keeps_our_sampler(make_data: DataFactory) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, strategy=DDPStrategy())
    data = make_data()
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert isinstance(loader.sampler, DistributedSampler)
        assert not trainer._data_connector._requires_distributed_sampler(loader)


@pytest.mark.parametrize("replicas", [2, 4])
def test_each_data_rank_validates_its_own_part(make_data: DataFactory, replicas: int) -> None:
    data = make_data(batch_size=1)
    data.setup("fit")
    alone = [bytes(batch.byte().numpy()) for batch in data.val_dataloader()]
    ranks = [on_data_rank(make_data(batch_size=1), rank, replicas) for rank in range(replicas)]
    for one in ranks:
        one.setup("fit")
    parts = [bytes(batch.byte().numpy()) for one in ranks for batch in one.val_dataloader()]
    assert sorted(parts) == sorted(alone)


def test_parts_may_be_left_out(make_data: DataFactory) -> None:
    data = make_data(val_fraction=0, test_fraction=0)
    data.setup("fit")
    assert data.val_dataloader() == data.test_dataloader() == []
    assert len(data.train_dataloader().dataset) == 53


def test_a_dataset_travels_to_a_worker_without_its_text(make_data: DataFactory) -> None:
    data = make_data()
    data.setup("fit")
    windows = data.train_dataloader().dataset
    pickled = pickle.dumps(windows)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[3], windows[3])


def test_hydra_containers_become_plain(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    data = TextDataModule(files=OmegaConf.create([str(tmp_path / "text")]))
    assert type(data.hparams["files"]) is list
    assert TextDataModule(files=str(tmp_path / "text")).hparams["files"] == data.hparams["files"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0\n  valid: an integer of at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0\n  valid: from 0 to below 1"),
        ({"test_fraction": -0.1}, "test_fraction=-0.1"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave no text for training"),
    ],
)
def test_impossible_options(make_data: DataFactory, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(**options)


def test_a_missing_file_is_said_at_once(make_data: DataFactory) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file matches 'missing.txt'"):
        make_data(files=["missing.txt"])


def test_too_little_text(make_data: DataFactory) -> None:
    with pytest.raises(ValueError, match=r"shorter than one window: 3401 tokens make 0 windows of length 4000 \+ 1"):
        make_data(length=4000).setup("fit")
    with pytest.raises(ValueError, match=r"43 training windows are fewer than the 44 of one step \(batch_size 44 x 1"):
        make_data(batch_size=44).setup("fit")
    with pytest.raises(ValueError, match=r"43 training windows are fewer than the 48 of one step \(batch_size 8 x 6"):
        on_data_rank(make_data(), 0, 6).setup("fit")
    with pytest.raises(ValueError, match=r"5 val windows are fewer than 6 data ranks(.|\n)*larger val_fraction"):
        on_data_rank(make_data(batch_size=2), 0, 6).setup("fit")
