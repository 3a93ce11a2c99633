"""Checkpoints in other forms: what goes on from them is what was saved, in Hugging Face, Lightning and on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lightning_3d.cli import main
from tests.marks import more
from tests.spmd.lightning_sharded import sharded
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import assert_same
from tests.spmd.tuned import CONFIGS, Tuned, save_model, tuned

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2}


def convert(*words: object) -> None:
    assert main(["convert", *map(str, words)]) == 0


def assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("llama", 4, TENSOR | PIPE),
        ("gpt2", 2, TENSOR | {"pad_vocabulary": True}),
        ("odd", 4, TENSOR | {"pad_vocabulary": True, "zero_stage": 3}),
        more("mixtral", 2, TENSOR),
        more("mixtral", 4, PIPE | {"zero_stage": 2}),
    ],
)
def test_hugging_face_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, world: int, strategy: dict[str, Any]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    save_model(kind, before)
    trained, *_ = run_spmd(tuned, world, kind, strategy, directory=before, save=tmp_path / "a.ckpt", timeout=120)
    convert(tmp_path / "a.ckpt", after, "--to", "safetensors", "--max-shard-size", "20KB")
    assert "'model.' is taken off the names" in capsys.readouterr().out
    CONFIGS[kind]().save_pretrained(after)
    model = transformers.AutoModelForCausalLM.from_pretrained(after)
    assert_bits({f"model.{name}": value for name, value in model.state_dict().items()}, trained["end"])
    assert len([*after.glob("*.safetensors")]) > 1
    convert(after, tmp_path / "again.ckpt", "--to", "mesh", "--prefix", "model.")
    (back, *_) = run_spmd(tuned, 2, kind, {"zero_stage": 3, "pretrained": str(tmp_path / "again.ckpt")}, timeout=60)
    assert_bits(back["start"], trained["end"])


def test_plain_lightning_goes_on_with_a_converted_file_and_a_mesh_with_its_own(tmp_path: Path) -> None:
    ours, plain, theirs, again = (tmp_path / name for name in ("ours.ckpt", "plain.ckpt", "theirs.ckpt", "again.ckpt"))
    whole, *_ = run_spmd(tuned, 4, "gpt2", TENSOR | PIPE, epochs=3, timeout=90)
    saved, *_ = run_spmd(tuned, 4, "gpt2", TENSOR | PIPE, save=ours, timeout=90)
    convert(ours, plain, "--to", "torch")
    loaded = Tuned.load_from_checkpoint(plain, kind="gpt2", weights_only=True)
    assert_bits(dict(loaded.state_dict()), saved["end"])
    (alone,) = run_spmd(tuned, 1, "gpt2", None, epochs=2, resume=plain, save=theirs, timeout=60)
    assert_bits(alone["start"], saved["end"])
    assert_same(alone["losses"], whole["losses"][2:4], "plain Lightning", close=1e-4)
    for form in ("mesh", "torch"):
        again = tmp_path / f"again {form}"
        convert(theirs if form == "mesh" else tmp_path / "again mesh", again, "--to", form)
        found, *_ = run_spmd(tuned, 2, "gpt2", PIPE | {"zero_stage": 2}, epochs=3, resume=again, timeout=60)
        assert_bits(found["start"], alone["end"])
        assert_same(found["losses"], whole["losses"][4:], form, close=1e-4)


@pytest.mark.parametrize("strategy", ["model parallel", "fsdp"])
def test_directories_of_lightning_go_on(tmp_path: Path, strategy: str) -> None:
    source = tmp_path / "theirs.ckpt"
    run_spmd(sharded, 2, strategy, epochs=1, save=source, timeout=60)
    (expected,) = run_spmd(sharded, 1, "auto", epochs=2, timeout=60)
    convert(source, tmp_path / "one.ckpt", "--to", "torch")
    convert(source, tmp_path / "mesh.ckpt", "--to", "mesh")
    convert(source, tmp_path / "weights", "--to", "safetensors")
    (alone,) = run_spmd(sharded, 1, "auto", epochs=2, resume=tmp_path / "one.ckpt", timeout=60)
    assert_same(alone, expected, "one file", close=1e-4)
    for rank, found in enumerate(run_spmd(sharded, 2, TENSOR, epochs=2, resume=tmp_path / "mesh.ckpt", timeout=60)):
        assert_same(found, expected, f"rank {rank}", close=1e-4)
