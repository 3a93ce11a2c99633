"""Modules that no formula knows are planned by their trace: of a decoder it tells what the formula does."""

import pytest

from lightning_3d.config.compose import compose_run
from lightning_3d.dryrun.tracing import model_of, plan
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.model import forward_flops, total_parameters
from lightning_3d.planner.request import decoder_of

GPT = (
    "model=gpt",
    "data=mock",
    "data.shapes.input_ids=[257]",
    "data.only=input_ids",
    "model.model.max_length=256",
    "model.model.hidden_size=128",
    "model.model.num_layers=3",
    "model.model.num_heads=4",
)


def test_a_trace_tells_what_the_formula_does() -> None:
    cfg = compose_run(GPT, config_name="plan")
    shape = decoder_of(cfg)
    assert shape is not None
    traced, formula = model_of(cfg), decoder_model(shape)
    assert len(traced.blocks) == 3
    assert len(set(traced.blocks)) == 1
    assert total_parameters(traced) == total_parameters(formula)
    assert forward_flops(traced) == pytest.approx(forward_flops(formula), rel=0.01)
    one, other = traced.blocks[0], formula.blocks[0]
    assert (one.rows, one.width, one.state) == (
        pytest.approx(other.rows, rel=0.01),
        pytest.approx(128, abs=2),
        other.state,
    )
    for kind in ("none", "selective", "full"):
        kept = one.keeps(kind).on_rank(1, False), other.keeps(kind).on_rank(1, False)
        assert kept[0] == pytest.approx(kept[1], rel=0.2)


def test_a_model_of_hugging_face(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = "{n_embd: 96, n_layer: 3, n_head: 6, n_positions: 64, vocab_size: 256}"
    words = ["model=hugging_face", f"+model.model.config={config}", "data=mock"]
    shapes = ["data.shapes.input_ids=[64]", "data.shapes.labels=[64]"]
    assert plan([*words, *shapes, "strategy=default", "cluster=a100_x8", "batch.global_size=64"]) == 0
    text = capsys.readouterr().out
    assert "Best of" in text
    assert "tensor 4: tensor_parallel_size=4 does not divide 6 heads" in text
