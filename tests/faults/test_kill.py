"""A rank that is killed in a step, a save or a load: the others end, and every checkpoint that is left is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.program import FOLDER, LOAD, SAVE, STEP
from tests.faults.trials import BACKGROUND, MESHES, NODES, Harness, Trial, all_trials
from tests.marks import more

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    found = Harness(tmp_path_factory.mktemp("killed"))
    yield found
    found.close()


@pytest.mark.parametrize(
    "trial",
    [
        Trial(mesh=NODES, doing=SAVE, rank=2),
        Trial(mesh=MESHES[3], doing=SAVE, rank=0),
        Trial(mesh=MESHES[3], doing=BACKGROUND, rank=3),
        Trial(mesh=MESHES[3], doing=LOAD, rank=1),
        more(Trial(mesh=MESHES[4], doing=STEP, rank=3)),
        more(Trial(mesh=MESHES[0], doing=BACKGROUND, rank=0)),
    ],
    ids=str,
)
def test_the_others_end_and_whole_checkpoints_are_left(harness: Harness, trial: Trial) -> None:
    finding = harness.run(trial)
    assert finding.good, finding


def test_there_are_sixty_trials() -> None:
    assert len(list(all_trials())) == 60


def test_nodes_with_different_checkpoints_of_one_name_do_not_go_on_from_a_mix(harness: Harness) -> None:
    job = replace(harness.job(NODES), steps=4)
    harness.finish(job)
    saved = job.node(3) / FOLDER
    shutil.rmtree(saved / "last.ckpt")
    # As it would be if a node had died before its part of the last save.
    shutil.copytree(saved / "step=2.ckpt", saved / "last.ckpt")
    again = replace(harness.job(NODES), steps=6, resume=f"{FOLDER}/last.ckpt")
    for rank in (0, 3):
        shutil.copytree(job.node(rank), again.node(rank))
    codes = harness.codes(again)
    assert all(codes)
    said = [again.output(rank).read_text() for rank in range(again.world)]
    text = "is not the same checkpoint on all nodes: of step 4 on rank 0, of step 2 on ranks 2-3."
    assert all(text in each for each in said), said[0]
    assert not any((again.node(rank) / FOLDER / "step=6.ckpt").exists() for rank in (0, 3))


def test_the_page_marks_what_was_not_as_promised(tmp_path: Path) -> None:
    from tests.faults.kill import page
    from tests.faults.trials import Finding

    good = Finding(
        trial=Trial(mesh=MESHES[0], doing=STEP, rank=0),
        moment="3 ms into step 2",
        seconds=1.0,
        codes=(1,),
        told=True,
        newest=(("last.ckpt", 2),),
        equal=True,
    )
    assert good.good
    bad = [replace(good, seconds=100.0), replace(good, codes=(0,)), replace(good, equal=False)]
    bad += [replace(good, newest=(None,)), replace(good, told=False)]
    assert not any(each.good for each in bad)
    text = page([good, *bad], "make faults", 60.0)
    assert "1 of 6 are as promised" in text
    assert [text.count(word) for word in ("**late**", "**no**", "**none**", "**(0,)**", "**(1,)**")] == [1] * 5
