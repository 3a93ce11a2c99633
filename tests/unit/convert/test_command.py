"""``lightning-3d convert``: nothing is lost, little memory is used, and what cannot be is one error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import save as save_plain

from lightning_3d.cli import main
from tests.unit.checkpoint.models import Model, adamw, load_all, opened, save_all, train


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def run(*words: object) -> int:
    return main(["convert", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run(*words) == 2
    return capsys.readouterr().err


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    stepped = [p for p in model.parameters() if p.requires_grad]
    first = torch.optim.AdamW([{"params": stepped[2:], "weight_decay": 0.3}, {"params": stepped[:1]}], lr=0.1)
    return [first, torch.optim.SGD(stepped[1:2], lr=0.1, momentum=0.9)]


def test_a_directory_comes_back_from_one_file(tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    optimizers = optimizers_of(model)
    train(model, optimizers, 3)
    config = OmegaConf.create({"lr": 0.1})
    save_all(tmp_path / "a", model, optimizers, distributed=True, hyper_parameters=config, epoch=3)
    assert run(tmp_path / "a", tmp_path / "b", "--to", "torch") == 0
    assert "2 optimizers with their state" in capsys.readouterr().out
    assert run(tmp_path / "b", tmp_path / "c", "--to", "mesh") == 0
    expected = train(model, optimizers, 2)
    for name in ("a", "b", "c"):
        torch.manual_seed(5)
        other = Model()
        again = optimizers_of(other)
        load_all(tmp_path / name, other, again)
        assert train(other, again, 2) == expected
        stored = opened(tmp_path / name)
        assert stored.metadata["hyper_parameters"] == config
        assert stored.metadata["epoch"] == 3
        assert stored.random is not None
        assert torch.equal(stored.random[0]["torch"], opened(tmp_path / "a").random[0]["torch"])  # type: ignore[index]
    plain = torch.load(tmp_path / "b", weights_only=True)
    assert plain["state_dict"]["head.weight"] is plain["state_dict"]["table.weight"]
    for optimizer, state in zip(optimizers_of(Model()), plain["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)


def test_tied_weights_are_written_once_and_files_have_a_size(
    tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = nn.ModuleDict({"net": model})
    save_all(tmp_path / "a", holder, [], distributed=True)
    assert run(tmp_path / "a", tmp_path / "one", "--to", "safetensors") == 0
    told = capsys.readouterr().out
    assert "'net.' is taken off" in told
    assert "tied, and written once: head.weight" in told
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == model.state_dict().keys() - {"head.weight"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())
    assert run(tmp_path / "a", tmp_path / "many", "--to", "safetensors", "--max-shard-size", "100", "--prefix", "") == 0
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert run(tmp_path / "many", tmp_path / "back", "--to", "torch") == 0
    state = torch.load(tmp_path / "back", weights_only=True)["state_dict"]
    assert state.keys() == {f"net.{name}" for name in found}


def test_a_prefix_leaves_the_rest_out(tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    save_all(tmp_path / "a", nn.ModuleDict({"net": model, "probe": nn.Linear(2, 1)}), [], distributed=False)
    assert run(tmp_path / "a", tmp_path / "b", "--to", "safetensors", "--prefix", "net.") == 0
    assert "left out: probe.weight, probe.bias" in capsys.readouterr().out
    assert "valid: net., probe." in refused(
        capsys, tmp_path / "a", tmp_path / "c", "--to", "safetensors", "--prefix", "x"
    )
    assert "--prefix changes names" in refused(capsys, tmp_path / "a", tmp_path / "c", "--to", "mesh", "--prefix", "x.")
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_is_one_error(tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a", tmp_path / "out"
    optimizer = adamw(model)
    train(model, [optimizer], 1)
    save_all(path, model, [optimizer], distributed=True)
    assert "exists already" in refused(capsys, path, path, "--to", "torch")
    assert "is a directory of lightning_3d already" in refused(capsys, path, out, "--to", "mesh")
    assert "there is no checkpoint" in refused(capsys, tmp_path / "b", out, "--to", "mesh")
    assert "--max-shard-size many" in refused(capsys, path, out, "--to", "safetensors", "--max-shard-size", "many")
    (path / "__0_0.distcp").write_bytes(b"")
    for form in ("torch", "safetensors"):
        assert "could not" in refused(capsys, path, out, "--to", form)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a"]


def test_parameters_without_names_are_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = adamw(model)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    torch.save(content, tmp_path / "a")
    assert "which is which cannot be told" in refused(capsys, tmp_path / "a", tmp_path / "b", "--to", "mesh")
    assert run(tmp_path / "a", tmp_path / "b", "--to", "mesh", "--weights-only") == 0
    assert opened(tmp_path / "b").optimizers is None


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/lightning_3d_must_not_exist"),))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_directory_of_others_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(2)
    optimizer = {"state": {"w": {"exp_avg": weight}}, "param_groups": [{"params": ["w"], "lr": Payload()}]}
    save_plain({"state_dict": {"w": weight}, "optimizer_0": optimizer}, checkpoint_id=tmp_path / "a", no_dist=True)
    torch.save({"epoch": 1}, tmp_path / "a" / "meta.pt")
    told = refused(capsys, tmp_path / "a", tmp_path / "b", "--to", "torch")
    assert "optimizer_0.param_groups.0.lr is more than plain data" in told
    assert not Path("/tmp/lightning_3d_must_not_exist").exists()
    assert run(tmp_path / "a", tmp_path / "b", "--to", "torch", "--weights-only") == 0


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    tensors, width = 16, 1024
    state = {f"net.{at}.weight": torch.full((width, width), float(at)) for at in range(tensors)}
    torch.save({"state_dict": state, "epoch": 1}, tmp_path / "a")
    one = width * width * 4
    forms: list[tuple[str, Callable[[Path], dict[str, Tensor]]]] = [("mesh", lambda _: {}), ("safetensors", load_files)]
    for form, load in forms:
        most = peak(lambda form=form: run(tmp_path / "a", tmp_path / form, "--to", form, "--max-shard-size", "8MB"))
        assert most < 4 * one + 8 * 2**20, f"{form}: {most / 2**20:.0f} MiB"
        assert all(torch.equal(value, state[f"net.{name}"]) for name, value in load(tmp_path / form).items())
    most = peak(lambda: run(tmp_path / "mesh", tmp_path / "b", "--to", "torch"))
    assert most < 4 * one + 8 * 2**20, f"torch: {most / 2**20:.0f} MiB"
    found = torch.load(tmp_path / "b", weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in found.items())
    assert found.keys() == state.keys()


def load_files(directory: Path) -> dict[str, Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def peak(act: Callable[[], int]) -> int:
    """Returns by how much this process' own memory grows at most."""
    done, seen = threading.Event(), [own_memory()]

    def sample() -> None:
        while not done.wait(0.0005):
            seen.append(own_memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    assert act() == 0
    done.set()
    thread.join()
    return max(seen) - seen[0]


def own_memory() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("counts memory as Linux tells it")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
