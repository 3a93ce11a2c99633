from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.commands import blocks
from tests.contract.sources import ROOT
from tests.documents.blocks import devices, run_blocks, saved_model
from tests.spmd.pool import run_spmd

# Scripts of their own: they start their processes themselves.
SCRIPTS = ("start.md",)
# Parts of a class, and lines behind a training of the page's words: not run, but read by the other tests.
FRAGMENTS = ("your_module.md",)
PAGES = {
    path.name: blocks(path.read_text(), "python")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name not in SCRIPTS + FRAGMENTS and blocks(path.read_text(), "python")
}
# They start processes or take long by themselves, and their own tests run the same calls.
ELSEWHERE = {"verify.md": "tests/spmd/test_verify.py", "dryrun.md": "tests/unit/dryrun"}


@pytest.mark.spmd
@pytest.mark.parametrize("page", [name for name in PAGES if name not in ELSEWHERE])
def test_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    python = PAGES[page]
    world = devices("\n".join(python))
    texts = {"/models/llama": str(saved_model(tmp_path / "llama"))}
    trained = run_spmd(run_blocks, world, python, tmp_path, texts, timeout=300)
    assert set(trained) == {"\n".join(python).count("Trainer(")}


@pytest.mark.spmd
@pytest.mark.timeout(400)
def test_the_first_programs_run(tmp_path: Path) -> None:
    train, check = blocks((ROOT / "docs" / "start.md").read_text(), "python")
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "check.py").write_text(check)
    told = _said("train.py", tmp_path)
    assert "pipeline   2 ranks" in told
    assert "`max_epochs=1` reached" in told
    assert "EQUAL in all that was compared: Model on data 1 x pipeline 2 x tensor 2" in _said("check.py", tmp_path)


def _said(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=190,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def test_what_is_run_elsewhere_is_there() -> None:
    assert all((ROOT / place).exists() for place in ELSEWHERE.values())
    assert set(ELSEWHERE) <= set(PAGES)
