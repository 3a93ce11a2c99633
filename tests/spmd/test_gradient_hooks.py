"""Gradient hooks of parameters that FSDP2 shards in the stages of a pipeline, and those that it cannot serve."""

from __future__ import annotations

import pytest

from tests.features.callback_programs import Hooked, gradient_hooks
from tests.features.here import DATA_3, Here, Mesh
from tests.features.modules import Data
from tests.features.table import Feature, Reference, Seen, prove

pytestmark = pytest.mark.spmd


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_hooks_go_on_in_the_stages_of_a_pipeline(zero_stage: int) -> None:
    strategy = {"pipeline_parallel_size": 2, "zero_stage": zero_stage}
    mesh = Mesh(name=f"data 2, pipeline 2, ZeRO {zero_stage}", strategy=strategy, world=4, data=2)
    prove(Feature(name="hooks", program=gradient_hooks), mesh, Reference())


def _waits(here: Here) -> Seen:
    module = Hooked()
    module.net.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    here.trainer().fit(module, Data(here))
    return {}


def test_a_hook_that_waits_for_an_accumulated_gradient_is_refused() -> None:
    said = "'net.head.bias' has a hook that runs when its gradient has accumulated"
    prove(Feature(name="waits", program=_waits, refused={DATA_3.name: said}), DATA_3, Reference())
