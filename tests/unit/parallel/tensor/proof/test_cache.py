from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_3d.parallel.tensor.plan import ParameterStyle, TensorPlan
from lightning_3d.parallel.tensor.proof import cache as proof_cache
from lightning_3d.parallel.tensor.proof.cache import ProofCache, default_directory, proof_key
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof
from lightning_3d.parallel.tensor.regions.plan import Region
from lightning_3d.shards.layout import Layout
from tests.unit.parallel.tensor.proving import training

PROOF = Proof(
    ranks=2,
    value_error=1e-16,
    parameter="layer.weight",
    error=2e-15,
    parameters=3,
    precision="float64",
    piece="all blocks, few samples",
    seconds=0.25,
)
PLAN = TensorPlan(
    size=2,
    rows=(ParameterStyle(name="layer.weight", style="column", layout=Layout(0, (8,)), shape=(8, 4)),),
    traffic={},
)
SOURCE = """
import lightning as L
from torch import nn

from {scaling} import scaled


class Model(L.LightningModule):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.heads = heads
        self.options = dict(rates=[0.1, 0.2])

    def training_step(self, batch, batch_idx):
        return scaled(self.layer(batch)).mean()
"""
SCALING = """
def scaled(x):
    return 2 * x
"""
Built = Callable[..., L.LightningModule]


class Sources:
    """A user's two files, which may be changed and loaded again."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._monkeypatch = monkeypatch
        self.write()

    def write(self, model: str = SOURCE, scaling: str = SCALING) -> None:
        self._load("users_scaling", scaling)
        self._model = self._load("users_model", model.format(scaling="users_scaling"))

    def build(self, **options: Any) -> L.LightningModule:
        module: L.LightningModule = self._model.Model(**options)
        return module

    def _load(self, name: str, text: str) -> Any:
        path = self._directory / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        self._monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Sources(tmp_path, monkeypatch)


CALL = training(torch.zeros(4, 4))


def _key(module: L.LightningModule, call: StepCall = CALL, plan: TensorPlan = PLAN) -> str:
    key = proof_key(module, call, plan)
    assert key is not None
    return key


# ---- keys ----


def test_the_same_model_has_the_same_key(sources: Sources) -> None:
    key = _key(sources.build())
    sources.write()
    assert _key(sources.build()) == key


@pytest.mark.parametrize(
    "files",
    [
        {"model": SOURCE.replace("self.layer(batch)", "self.layer(2 * batch)")},
        {"scaling": SCALING.replace("2 * x", "3 * x")},
    ],
    ids=["class", "function"],
)
def test_a_changed_line_changes_the_key(sources: Sources, files: dict[str, str]) -> None:
    key = _key(sources.build())
    sources.write(**files)
    assert _key(sources.build()) != key


def test_files_that_the_model_needs_nothing_of_do_not_change_the_key(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another command loads other files."""
    key = _key(sources.build())
    (tmp_path / "other.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("other")
    assert _key(sources.build()) == key


def test_attributes_change_the_key(sources: Sources) -> None:
    key = _key(sources.build())
    assert _key(sources.build(heads=4)) != key
    assert _key(sources.build().eval()) != key
    changed = sources.build()
    changed.options["rates"][1] = 0.3
    assert _key(changed) != key


def test_shapes_dtypes_and_frozen_parameters_change_the_key(sources: Sources) -> None:
    modules = [sources.build(), sources.build(width=16), sources.build().double(), sources.build()]
    modules[-1].layer.weight.requires_grad_(False)
    assert len({_key(module) for module in modules}) == 4


def test_values_do_not_change_the_key(sources: Sources) -> None:
    module = sources.build()
    key = _key(module)
    torch.nn.init.zeros_(module.layer.weight)
    assert _key(module) == key


def test_the_plan_changes_the_key(sources: Sources) -> None:
    module = sources.build()
    (row,) = PLAN.rows
    region = Region(module="layer", layouts={}, outputs={True: ("sum",), False: ("sum",)}, error=0.0)
    plans = [
        PLAN,
        replace(PLAN, size=4),
        replace(PLAN, sequence=True),
        replace(PLAN, partial=frozenset({"layer.bias"})),
        replace(PLAN, regions=(region,)),
        replace(PLAN, rows=(replace(row, layout=Layout(0, (4, 4))),)),
    ]
    assert len({_key(module, plan=plan) for plan in plans}) == len(plans)


def test_the_step_changes_the_key(sources: Sources) -> None:
    module = sources.build()
    calls = [
        CALL,
        replace(CALL, method="validation_step"),
        training(torch.zeros(8, 4)),
        training(torch.zeros(4, 4, dtype=torch.float64)),
    ]
    assert len({_key(module, call) for call in calls}) == len(calls)
    assert _key(module, training(torch.ones(4, 4))) == _key(module)


def test_a_version_changes_the_key(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sources.build()
    key = _key(module)
    monkeypatch.setattr(proof_cache, "version", lambda name: "99.0" if name == "torch" else "1.0")
    changed = _key(module)
    monkeypatch.setattr(proof_cache, "version", lambda name: "1.0")
    assert len({key, changed, _key(module)}) == 3


def test_a_class_without_source_has_no_key() -> None:
    space: dict[str, Any] = {"L": L, "__name__": "nowhere"}
    exec("class Model(L.LightningModule):\n    pass", space)
    assert proof_key(space["Model"](), CALL, PLAN) is None


# ---- files ----


def test_a_proof_is_found_again(tmp_path: Path) -> None:
    cache = ProofCache(tmp_path / "new" / "proofs")
    assert cache.find("key") is None
    cache.keep("key", PROOF)
    assert cache.find("key") == replace(PROOF, cached=True)
    assert cache.find("other") is None
    assert [file.name for file in (tmp_path / "new" / "proofs").iterdir()] == ["key.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"ranks": 2}', '{"later": 1}', "\xff"])
def test_a_file_that_cannot_be_read_is_no_proof(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_bytes(text.encode("latin-1"))
    assert ProofCache(tmp_path).find("key") is None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    cache = ProofCache(tmp_path / "file" / "proofs")
    cache.keep("key", PROOF)
    assert cache.find("key") is None


def test_the_directory_is_the_user_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/lightning_3d/proofs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_directory() == Path("/home/someone/.cache/lightning_3d/proofs")
