import subprocess
import sys
from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace

import pytest

from lightning_3d import __version__, cli
from lightning_3d.errors import MeshError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Replaces the verbs' modules by one that records its calls."""
    seen: list[tuple[str, list[str]]] = []

    def fake_module(module: str) -> SimpleNamespace:
        def run(arguments: Sequence[str]) -> int:
            seen.append((module, list(arguments)))
            return 3

        return SimpleNamespace(run=run)

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=fake_module))
    return seen


@pytest.mark.parametrize(
    ("arguments", "verb", "rest"),
    [
        (["train", "recipe=demo"], "train", ["recipe=demo"]),
        (["doctor"], "doctor", []),
        (["train", "--hydra-help"], "train", ["--hydra-help"]),
        (["convert", "--help"], "convert", ["--help"]),
        (["recipe=demo", "strategy.zero_stage=3"], "train", ["recipe=demo", "strategy.zero_stage=3"]),
        (["-m", "seed=1,2"], "train", ["-m", "seed=1,2"]),
        (["--config-dir", "my", "model=mine"], "train", ["--config-dir", "my", "model=mine"]),
        (["+x=1"], "train", ["+x=1"]),
        (["~logger"], "train", ["~logger"]),
    ],
)
def test_words_reach_their_verb(
    calls: list[tuple[str, list[str]]], arguments: list[str], verb: str, rest: list[str]
) -> None:
    assert cli.main(arguments) == 3
    assert calls == [(f"lightning_3d.{verb}", rest)]


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian", "recipe=demo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "lightning-3d: error: there is no verb 'trian'",
        f"  valid: {', '.join(cli.VERBS)}",
        "  fix: lightning-3d train",
    ]


def test_unknown_verb_without_a_near_one_points_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["xyz"]) == 2
    assert "fix: lightning-3d --help" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in cli.VERBS)


def _raise_mesh_error(_: object, __: object) -> int:
    raise MeshError("3 does not divide 8", fix="trainer.devices=6")


def test_users_errors_are_one_message_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.Verb, "__call__", _raise_mesh_error)
    monkeypatch.setenv("RANK", "2")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "lightning-3d (rank 2): error: 3 does not divide 8\n  fix: trainer.devices=6\n"


def test_debug_variable_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.Verb, "__call__", _raise_mesh_error)
    monkeypatch.setenv("LIGHTNING_3D_DEBUG", "1")
    with pytest.raises(MeshError, match="3 does not divide 8"):
        cli.main(["train"])


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"train": cli.Verb(function="lightning_3d.absent:run", summary="")}
    monkeypatch.setattr(cli, "VERBS", MappingProxyType(table))
    with pytest.raises(ModuleNotFoundError, match=r"lightning_3d\.absent"):
        cli.main(["train"])


def test_version_answers_without_torch() -> None:
    watch = "import sys; sys.argv = ['lightning-3d', '--version']; from lightning_3d.cli import main; code = main()"
    tell = "print(code, [name for name in ('torch', 'lightning', 'hydra') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{watch}; {tell}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [f"lightning-3d {__version__}", "0 []"]


def test_module_form_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lightning_3d", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: lightning-3d VERB")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "lightning_3d.cli" in imported
    assert "torch" not in imported
