"""What a start costs: an answer that needs no torch does not wait for it."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lightning_3d.cli import VERBS

# Of CPU, which other processes do not disturb as they do wall time; the promise is 1.5. A slow machine may take more,
# but no more than this share of what it would take to import Lightning.
SECONDS, SHARE = 1.5, 0.25
_WATCHED = """
import sys
sys.argv = ["lightning-3d", *sys.argv[1:]]
from lightning_3d.cli import main
try:
    code = main()
except SystemExit as ended:
    code = ended.code
print("loaded:", *(name for name in ("torch", "lightning", "transformers") if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


def _started(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    return _timed("-c", _WATCHED, *arguments, folder=folder)


@cache
def _lightning_seconds() -> float:
    return _timed("-c", "import lightning", folder=Path())[1]


def _timed(*arguments: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_answers_at_once(verb: str, tmp_path: Path) -> None:
    done, seconds = _started(tmp_path, *verb.split(), "--help")
    assert done.returncode == 0
    assert done.stderr == "loaded:\n"
    assert done.stdout.startswith(f"usage: lightning-3d {verb}")
    assert seconds < SECONDS or seconds < SHARE * _lightning_seconds()


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("train recipe=dem", "recipe=dem does not exist"),
        ("train recipe=demo strategy.zero_stag=3", "there is no key strategy.zero_stag"),
        ("train recipe=demo strategy.tensor_parallel_size=3 trainer.devices=4", "4 processes cannot be divided by"),
        ("plan recipe=dem", "recipe=dem does not exist"),
        ("plan recipe=demo strategy.zero_stage=7", "zero_stage=7 must be an integer from 0 to 3"),
        ("dryrun recipe=demo strategy.zero_stage=7", "zero_stage=7 must be an integer from 0 to 3"),
        ("dryrun recipe=demo strategy=3d coordinates=[[0,9,0]] trainer.devices=8", "9"),
        ("verify recipe=demo strategy.zero_stage=7", "zero_stage=7 must be an integer from 0 to 3"),
        ("convert here . --to torch", "exists already"),
    ],
)
def test_what_is_wrong_is_told_before_torch_is_imported(words: str, fact: str, tmp_path: Path) -> None:
    done, seconds = _started(tmp_path, *words.split())
    assert done.returncode == 2
    assert fact in done.stderr
    assert done.stderr.endswith("\nloaded:\n")
    assert seconds < SECONDS or seconds < SHARE * _lightning_seconds()


def test_help_of_a_verb_tells_groups_and_options_with_their_comments(tmp_path: Path) -> None:
    text = _started(tmp_path, "plan", "--help")[0].stdout
    assert "\n  cluster    a100_x8, " in text
    assert "\n  recipe     bert_large, demo, " in text
    assert "\n  # Price the mesh of `strategy` instead of searching for one.\n  evaluate: false\n" in text
    assert "defaults:" not in text
    assert "hydra" not in text
    assert "--hydra-help" in _started(tmp_path, "train", "--help")[0].stdout


def test_naming_the_strategy_adds_little_to_lightnings_own_import() -> None:
    code = (
        "import sys, time, lightning\n"
        "begin = time.process_time()\n"
        "from lightning_3d import Mesh3DStrategy\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "seconds = time.process_time() - begin\n"
        "late = ('hydra', 'torch.distributed.checkpoint', 'lightning_3d.plan', 'lightning_3d.strategy.run')\n"
        "assert 'mesh_3d' in StrategyRegistry\n"
        "print(seconds, *(name for name in late if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    seconds, *loaded = done.stdout.split()
    assert loaded == []
    assert float(seconds) < 0.3
