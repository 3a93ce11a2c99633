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


def test_rows_that_shards_pad_are_counted() -> None:
    """Eight experts in one tensor: with 32 shards three of four rows that travel are padding."""
    pytest.importorskip("transformers")
    sizes = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 128}"
    config = "{num_key_value_heads: 4, num_local_experts: 8, num_experts_per_tok: 2, use_cache: false}"
    words = [f"model.model.config={{{sizes[1:-1]}, {config[1:-1]}}}", "data.shapes={input_ids:[16],labels:[16]}"]
    limits = "data.limits={input_ids:128,labels:128}"
    block = model_of(compose_run(["recipe=mixtral_8x7b", *words, limits], config_name="plan")).blocks[0]
    experts = 8 * 3 * 32 * 64
    # Each of 16 tokens goes through 2 of the 8, in grouped products, which selective recomputation does not keep.
    assert block.again_flops == 2 * 16 * 2 * 3 * 32 * 64
    # Queries, keys, values, what leaves attention, the router.
    assert block.matmul_flops - block.again_flops == 2 * 16 * (4 * 32 * 32 + 8 * 32)
    assert block.padding(1, 8) == 0
    assert experts <= block.padding(1, 16) < 1.1 * experts
    assert 3 * experts <= block.padding(1, 32) < 3.1 * experts
