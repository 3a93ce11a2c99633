"""The precision of a configuration: the trainer's word, or that of the mesh's plugin, however it is written."""

import pytest

from lightning_3d.config.compose import compose_run
from lightning_3d.config.precision import precision_of
from lightning_3d.dryrun.setup import training_of

PLUGIN = "_target_: lightning_3d.Mesh3DPrecision"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "32-true"),
        (["trainer.precision=bf16-mixed"], "bf16-mixed"),
        (["trainer.precision=null"], "32-true"),
        (["trainer=gpu_master"], "bf16-master"),
        ([f"+trainer.plugins=[{{{PLUGIN}, precision: bf16-master}}]"], "bf16-master"),
        ([f"+trainer.plugins=[{{{PLUGIN}, _args_: [bf16-master]}}]"], "bf16-master"),
        ([f"+trainer.plugins={{{PLUGIN}, _args_: [64-true]}}", "trainer.precision=null"], "64-true"),
        ([f"+trainer.plugins=[{{{PLUGIN}}}]", "trainer.precision=64-true"], "32-true"),
        (["+trainer.plugins=[{_target_: torch.nn.Identity}]", "trainer.precision=64-true"], "64-true"),
    ],
)
def test_who_names_the_precision(words: list[str], expected: str) -> None:
    assert precision_of(compose_run(words)) == expected


def test_a_dry_run_and_a_plan_read_the_same() -> None:
    """The first argument of the plugin counts, which the trainer itself would take too."""
    words = ["recipe=demo", "trainer.precision=null", f"+trainer.plugins=[{{{PLUGIN}, _args_: [bf16-master]}}]"]
    assert training_of(compose_run([*words, "data.max_bytes=20000"], config_name="dryrun")).precision == "bf16-master"
