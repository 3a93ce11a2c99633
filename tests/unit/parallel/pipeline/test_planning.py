from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config.schema import SCHEDULES
from lightning_3d.errors import PlanError
from lightning_3d.graph.parameters import parameter_table
from tests.parity.catalog import build, global_batches
from tests.parity.models import NextToken
from tests.parity.tensor_models import SIZES, Translation, hf
from tests.unit.parallel.pipeline.planned import (
    BLOCKS,
    WIDTH,
    Auxiliary,
    Deep,
    Lambdas,
    Norms,
    Relative,
    Small,
    TiedHead,
    WithCopy,
    beside,
    plan,
    plan_of,
    received,
    shared,
    small_plan,
    states,
)


def _pairs() -> tuple[Tensor, Tensor]:
    return torch.arange(24).view(2, 12), torch.arange(24).view(2, 12)


# What the second of two stages is sent, what it shares, and what the two call beside their blocks.
MODELS: dict[str, tuple[list[str], list[str], dict[str, tuple[int, ...]]]] = {
    "HF Llama, 8 blocks": (
        ["0 of model.model.layers.3"],
        [],
        {"model.model.embed_tokens": (0,), "model.model.norm": (1,), "model.lm_head": (1,)},
    ),
    "HF GPT-2 (tied), 8 blocks": (
        ["0 of model.transformer.h.3"],
        ["model.transformer.wte.weight"],
        {
            "model.transformer.wte": (0,),
            "model.transformer.wpe": (0,),
            "model.transformer.ln_f": (1,),
            "model.lm_head": (1,),
        },
    ),
    "HF BERT for masked tokens, 8 blocks": (
        ["0 of model.bert.encoder.layer.3"],
        ["model.bert.embeddings.word_embeddings.weight"],
        {"model.bert.embeddings": (0,), "model.cls": (1,)},
    ),
    "HF BERT classifier, padded, 8 blocks": (
        ["0 of model.bert.encoder.layer.3"],
        [],
        {"model.bert.embeddings": (0,), "model.bert.pooler": (1,), "model.classifier": (1,)},
    ),
    "HF ViT, 8 blocks": (
        ["0 of model.vit.layers.3"],
        [],
        {"model.vit.embeddings": (0,), "model.vit.layernorm": (1,), "model.classifier": (1,)},
    ),
    "HF Mixtral, router losses, 8 blocks": (
        [*(f"0 of model.model.layers.{index}.mlp.gate" for index in range(4)), "0 of model.model.layers.3"],
        [],
        {"model.model.embed_tokens": (0,), "model.model.norm": (1,), "model.lm_head": (1,)},
    ),
    "nn.TransformerEncoder, 8 blocks": (
        ["0 of model.encoder.layers.3"],
        [],
        {"model.embedding": (0,), "model.head": (1,)},
    ),
    "reference GPT, 8 blocks": (
        ["0 of model.blocks.3"],
        ["model.token_embedding.weight"],
        {
            "model.token_embedding": (0,),
            "model.position_embedding": (0,),
            "model.norm": (1,),
            "model.head": (1,),
        },
    ),
    "residual network, 4 groups of 2": (["0 of model.layer2.1"], [], {"model.stem": (0,), "model.head": (1,)}),
    "U-Net skips, 8 blocks": (
        ["0 of model.enter", *["0 of add"] * 4],
        ["model.gains"],
        {"model.enter": (0,), "model.leave": (1,)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_of_models(name: str) -> None:
    values, common, modules = MODELS[name]
    found = plan_of(name, layers_per_stage=[4, 4])
    assert received(found, 1) == values
    assert list(shared(found)) == common
    assert beside(found) == modules
    assert all(value.requires_grad for value in found.boundaries[1])


def test_every_block_of_a_decoder_takes_what_the_encoder_has_made() -> None:
    found = plan_of("HF T5, 4 + 4 blocks", 4, layers_per_stage=[2, 2, 2, 2])
    first = "model.encoder.block.0", "model.decoder.block.0"
    assert received(found, 1) == [f"1 of {first[0]}", "0 of model.encoder.block.1"]
    # Two dropouts: of the encoder's output, and of the decoder's embedding.
    assert received(found, 2) == ["0 of dropout", "0 of dropout"]
    states_, bias, cross, hidden = received(found, 3)
    assert states_ == "0 of dropout"
    assert [bias, cross, hidden] == [f"1 of {first[1]}", f"2 of {first[1]}", "0 of model.decoder.block.1"]
    assert shared(found) == {"model.shared.weight": (0, 1, 3)}


def test_an_encoder_of_another_class_than_the_decoder() -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    more = {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 12}
    tokens = {"vocab_size": 96, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = hf("BartConfig/BartForConditionalGeneration", **sizes, **more, **tokens)
    found = plan(Translation(model), _pairs(), layers_per_stage=[3, 1])
    kinds = [type(model.get_submodule(block.removeprefix("model."))).__name__ for block in found.blocks]
    assert kinds == ["BartEncoderLayer"] * 2 + ["BartDecoderLayer"] * 2
    encoded, hidden = received(found, 1)
    assert encoded == "0 of model.model.encoder.layers.1"
    assert hidden == "0 of model.model.decoder.layers.0"
    assert list(shared(found)) == ["model.model.shared.weight"]


def test_relative_positions_of_hugging_face() -> None:
    options = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 12}
    sizes = {**SIZES, "num_hidden_layers": 4, "max_position_embeddings": 12, "type_vocab_size": 0}
    model = hf("DebertaV2Config/DebertaV2ForMaskedLM", **sizes, **options)
    found = plan(NextToken(model), _pairs()[:1], layers_per_stage=[2, 2])
    assert received(found, 1) == ["0 of model.deberta.encoder.layer.1"]
    positions = "model.deberta.encoder.rel_embeddings"
    assert shared(found)[f"{positions}.weight"] == (0, 1)


def test_hidden_states_that_hooks_collect() -> None:
    class AllStates(NextToken):
        def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
            hidden = self.model(batch[0], output_hidden_states=True).hidden_states
            return torch.stack([state.square().mean() for state in hidden]).sum()

    model = hf("LlamaConfig/LlamaForCausalLM", **{**SIZES, "num_hidden_layers": 4}, max_position_embeddings=12)
    found = plan(AllStates(model), _pairs()[:1], layers_per_stage=[2, 2])
    names = ["embed_tokens", "layers.0", "layers.1"]
    assert received(found, 1) == [f"0 of model.model.{name}" for name in names]


def test_a_head_that_is_a_function_of_the_first_weight() -> None:
    found = small_plan(TiedHead())
    assert shared(found) == {"model.enter.weight": (0, 1)}
    assert beside(found) == {"model.enter": (0,)}
    assert found.stages[1].cost > found.stages[0].cost * 0.9


def test_norms_in_a_list_of_their_own() -> None:
    found = small_plan(Norms())
    assert received(found, 1) == ["0 of model.norms.1"]
    assert beside(found) == {
        "model.enter": (0,),
        "model.norms.0": (0,),
        "model.norms.1": (0,),
        "model.norms.2": (1,),
        "model.norms.3": (1,),
        "model.leave": (1,),
    }


def test_parameters_of_the_container_for_each_block() -> None:
    found = small_plan(Lambdas())
    assert received(found, 1) == ["0 of rms_norm", "0 of add"]
    # The mix before the second stage's first block belongs to the first stage.
    assert [found.holders[f"model.lambdas.{index}"] for index in range(BLOCKS)] == [(0,), (0,), (0,), (1,)]


def test_losses_that_the_container_sums() -> None:
    assert received(small_plan(Auxiliary()), 1) == ["0 of model.blocks.1", "0 of add"]


def test_a_module_that_blocks_call() -> None:
    found = small_plan(Relative())
    assert received(found, 1) == ["0 of model.blocks.1"]
    assert shared(found) == {"model.positions.weight": (0, 1)}
    assert beside(found) == {"model.positions": (0, 1)}


def test_a_sequence_of_layers_of_several_classes() -> None:
    found = plan_of("nn.Sequential MLP", layers_per_stage=[4, 5])
    assert len(found.blocks) == 9
    assert received(found, 1) == ["0 of dropout"]
    assert found.blocks[4] == "model.12"


def test_two_layers_in_a_row() -> None:
    found = small_plan(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 4)))
    assert [(stage.first, stage.end, stage.rank) for stage in found.stages] == [(0, 1, 0), (1, 2, 1)]
    assert received(found, 1) == ["0 of model.0"]
    assert found.boundaries[1][0].shape == (2, 3, 16)


def test_what_is_logged_or_returned_is_needed_at_the_end() -> None:
    class Logs(Small):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            x = self.model.enter(batch)
            self.log("size", x.abs().mean())
            self.log_dict({"rows": x.shape[0], "batch": batch.mean()})
            early = self.model.blocks[0](x).detach()
            for block in self.model.blocks[1:]:
                x = block(x)
            return {"loss": x.square().mean(), "early": early}

    found = plan(Logs(Deep()), states(), layers_per_stage=[2, 2])
    assert sorted(received(found, 1)) == ["0 of detach", "0 of mean", "0 of model.blocks.1"]
    assert sum(not value.requires_grad for value in found.boundaries[1]) == 1


def test_copies_that_no_step_calls_are_no_blocks_and_lie_with_their_originals() -> None:
    found = plan(WithCopy(), states())
    assert found.blocks == tuple(f"model.blocks.{index}" for index in range(BLOCKS))
    copies = [name for name in found.holders if name.startswith("copy.")]
    assert copies
    assert all(found.holders[name] == found.holders[name.replace("copy.", "model.", 1)] for name in copies)
    assert beside(found)["copy.blocks.3"] == found.modules["model.blocks.3"]


def test_an_unused_parameter_lies_with_its_module() -> None:
    class Unused(Deep):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.leave.weight)

    model = Unused()
    model.spare = nn.Parameter(torch.ones(1))
    found = small_plan(model)
    assert found.holders["model.leave.bias"] == (1,)
    assert found.modules["model.leave"] == (1,)
    assert found.holders["model.spare"] == (0,)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_schedules(schedule: str) -> None:
    found = plan_of("HF GPT-2 (tied), 8 blocks", 2, pipeline_schedule=schedule)
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    assert [stage.index for stage in found.stages] == list(range(2 * per_rank))
    assert sorted(len(found.stages_of(rank)) for rank in range(2)) == [per_rank] * 2
    assert found.last_rank == (0 if schedule in ("zbvzerobubble", "dualpipev") else 1)
    assert sum(stage.cost for stage in found.stages) == pytest.approx(1)
    tied = "model.transformer.wte.weight"
    assert found.holders[tied] == (0, 2 * per_rank - 1)
    assert (tied in found.shared) == (found.last_rank == 1)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layers", range(1, 18))
def test_each_block_is_owned_once(layers: int, stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)), nn.LayerNorm(2)) if layers == 1 else None
    module = Small(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))) if model is None else model)
    batch = torch.zeros(3, 2)
    count = layers + (layers == 1)
    if count < stages:
        with pytest.raises(PlanError, match=f"needs {stages} blocks, the model has {count}"):
            plan(module, batch, stages)
        return
    found = plan(module, batch, stages)
    assert [block for stage in found.stages for block in found.blocks[stage.first : stage.end]] == list(found.blocks)
    assert len(set(found.blocks)) == count
    table = parameter_table(module)
    owned = [sum(row.numel for row in table.rows if found.holders[row.name] == (index,)) for index in range(stages)]
    assert sum(owned) == table.numel
    assert all(owned)


def test_a_deep_model_is_cut_evenly() -> None:
    found = small_plan(Deep(blocks=96), 4)
    assert [stage.layers for stage in found.stages] == [24, 24, 24, 24]
    assert received(found, 2) == ["0 of model.blocks.47"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers_per_stage": [3, 2]}, r"layers_per_stage=\[3, 2\] has 2 entries and 5 blocks in all"),
        ({"pipeline_stack": "model.block"}, "did you mean model.blocks"),
        ({"pipeline_schedule": "zbvzerobubble", "stages_per_rank": 2, "ranks": 3}, "needs 6 blocks, the model has 4"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        small_plan(Deep(), **options)


def test_no_stack() -> None:
    with pytest.raises(PlanError, match="no list of two or more layers"):
        small_plan(nn.Linear(WIDTH, WIDTH))


def test_plans_travel_between_processes() -> None:
    found = plan_of("HF T5, 4 + 4 blocks", 2)
    assert pickle.loads(pickle.dumps(found)) == found


def test_nothing_is_left_in_the_module() -> None:
    module = build("HF Mixtral, router losses, 8 blocks")
    before = {name: (dict(vars(child)), type(child)) for name, child in module.named_modules()}
    plan(module, _pairs()[:1])
    assert {name: (dict(vars(child)), type(child)) for name, child in module.named_modules()} == before
    assert not any(child._forward_hooks for child in module.modules())


def test_the_plan_as_text() -> None:
    text = str(plan_of("HF GPT-2 (tied), 8 blocks", 2, layers_per_stage=[4, 4]))
    assert text.splitlines()[0] == "pipeline   2 ranks, 1f1b, 8 blocks on 2 stages"
    for part in (
        "model.transformer.h.4 .. model.transformer.h.7",
        "6.00 KiB",
        "<- output 0 of model.transformer.h.3 [4, 12, 32] float32",
        "stage 1 also calls model.transformer.ln_f, model.lm_head",
        "model.transformer.wte.weight (stages 0, 1)",
    ):
        assert part in text


@pytest.mark.parametrize("name", ["HF Llama, 8 blocks", "HF T5, 4 + 4 blocks", "nn.TransformerEncoder, 8 blocks"])
def test_a_module_on_the_meta_device_has_the_same_plan(name: str) -> None:
    with torch.device("meta"):
        module = build(name)
    made = global_batches(name, 1, 4)[0]
    assert plan(module, made) == plan_of(name)
