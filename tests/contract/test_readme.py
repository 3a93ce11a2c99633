"""What the documents tell people to type exists: verbs, overrides, targets, names."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_3d.cli import VERBS
from lightning_3d.config.compose import compose_run
from lightning_3d.train.prepare import prepare
from tests.contract.commands import blocks, make_targets, program_arguments, shell_commands
from tests.contract.sources import ROOT

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMANDS = {" ".join(words): words for path in DOCUMENTS for words in shell_commands(path.read_text())}
_OTHER_PROGRAMS = ("pip", "python", "torchrun", "srun", "cat", "ls", "export", "source")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    words = COMMANDS[command]
    arguments = program_arguments(words)
    if arguments is not None:
        assert arguments[0] in (*VERBS, "--help", "--version") or "=" in arguments[0]
    elif words[0] == "make":
        assert set(words[1:]) <= make_targets(ROOT / "Makefile")
    else:
        assert words[0] in _OTHER_PROGRAMS


def _overrides(command: str) -> list[str] | None:
    """Returns the overrides of a training command; None for one that needs the reader's own folder."""
    arguments = program_arguments(COMMANDS[command])
    if not arguments or arguments[0] != "train" or "--config-dir" in arguments:
        return None
    return [word for word in arguments[1:] if "=" in word]


TRAINING = {command: overrides for command in COMMANDS if (overrides := _overrides(command)) is not None}


@pytest.mark.parametrize("command", TRAINING)
def test_overrides_make_a_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the reader has trained the demo before.
    (tmp_path / "logs/demo/runs/first/checkpoints/last.ckpt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    first_of_each = [override.split(",")[0] for override in TRAINING[command]]
    # The folder of a job is Hydra's to give, and there is no job here.
    prepare(compose_run([*first_of_each, "paths.output_dir=here"]))


def test_something_is_looked_at() -> None:
    assert len(TRAINING) >= 4
    assert "make demo" in COMMANDS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_of_the_documents_parses_and_imports(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_3d"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"]], ids=" ".join)
def test_cheap_commands_run(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lightning_3d", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "lightning-3d" in done.stdout


def test_every_choice_is_in_the_page_on_configuration() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*?\|(.*)\|$", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    told = {f"{group}={choice}" for group, choices in rows for choice in re.findall(r"`([\w]+)`", choices)}
    groups = {f"{path.parent.name}={path.stem}" for path in (ROOT / "conf").glob("*/*.yaml")}
    # Files that others build on are not chosen themselves.
    parts = {"callbacks=model_checkpoint", "callbacks=throughput", "model=language_model", "hydra=default"}
    assert told == groups - parts | {f"recipe={path.stem}" for path in (ROOT / "recipes").glob("*.yaml")}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_make_help_lists_what_the_readme_needs() -> None:
    assert {"demo", "test", "check", "parity", "docs", "bench"} <= make_targets(ROOT / "Makefile")
