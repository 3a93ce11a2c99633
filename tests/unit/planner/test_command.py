"""The verb: a configuration in, five steps, the best meshes, rejections and text to paste out."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_3d.config.compose import compose_run
from lightning_3d.dryrun.tracing import plan as run
from lightning_3d.errors import BatchError, ConfigError, Lightning3DError
from lightning_3d.planner import BatchShape, BlockModel, Part
from lightning_3d.planner.command import Answer, overrides, plan
from lightning_3d.planner.request import recipe_of

# GPT-3 175B on the article's 512 devices.
GPT_175B = (
    "task_name=gpt3_175b",
    "model=gpt",
    "model.model.num_layers=96",
    "model.model.hidden_size=12288",
    "model.model.num_heads=96",
    "model.model.vocab_size=51200",
    "data.length=2048",
    "batch.global_size=1536",
    "batch.micro_size=4",
    "cluster=a100_x8",
    "cluster.nodes=64",
    "bytes_recipe=bf16_master",
    "strategy=3d",
    "strategy.pipeline_parallel_size=4",
    "strategy.tensor_parallel_size=8",
    "strategy.activation_checkpointing=full",
)


def answered(words: Sequence[str]) -> Answer:
    return plan(compose_run(words, config_name="plan"))


@pytest.fixture(scope="module")
def article() -> Answer:
    return answered(GPT_175B)


def test_the_five_steps_of_the_article(article: Answer) -> None:
    assert article.rule is not None
    assert article.found is not None
    first, second, third, fourth, fifth = article.rule.steps
    assert "18 B x 174.6B = 3142" in first.number or "18 B x 174.6B = 3143" in first.number
    assert "weights 3.62 GB, states 32.6 GB" in second.number
    assert third.decision == "tensor up to 8"
    assert "1600 Gb/s" in fourth.number
    assert "512 / (pipeline" in fifth.number
    example = article.rule.readings[-1]
    assert example.mesh is not None
    assert (example.mesh.mesh.tensor_parallel_size, example.mesh.mesh.pipeline_parallel_size) == (8, 4)
    assert example.mesh.step_seconds > article.found.best[0].step_seconds
    by_the_letter = article.rule.readings[0]
    assert by_the_letter.mesh is not None
    assert by_the_letter.mesh.step_seconds > 1.3 * article.found.best[0].step_seconds


def test_which_figures_of_the_article_hold(article: Answer) -> None:
    assert article.look is not None
    claims = {claim.said: claim for claim in article.look.claims}
    assert {said for said, claim in claims.items() if claim.holds} == {
        "bubble 12 % of a step",
        "tensor 8 % of a step",
        "recomputing everything costs 30 %",
    }
    impossible, alone, *_, slow = claims.values()
    assert "175e9 x 16 B / 32 = 87.5 GB of states" in impossible.found
    assert "87.3 GB of states, 92 GB with activations" in impossible.found
    assert "ZeRO 0 350.0 GB, ZeRO 1 91.6 GB, ZeRO 3 5.5 GB" in alone.found
    assert "0.35% of their peak" in claims["560 TFLOP/s are 70 % efficiency on 512 devices"].found
    assert (
        "both have 3/27; 4 micro-batches are in flight in place of 24"
        in claims["1F1B has a smaller bubble than GPipe"].found
    )
    assert (
        "29 GB of states"
        in claims["an attention layer of 1.4 GB does not fit one device, so tensor ranks are needed"].found
    )
    assert slow.said == "on 25 GbE less pipeline and more data"
    assert not slow.holds
    text = str(article)
    assert all(f"{'holds' if claim.holds else 'does not hold'}: {said} - " in text for said, claim in claims.items())
    facts = "\n".join(article.look.facts)
    assert "ZeRO 0 87.3 GB, ZeRO 1 25.9 GB, ZeRO 2 15.7 GB" in facts
    assert "stored 16.0 times (ZeRO 0), 4.8 times (ZeRO 1)" in facts
    assert "bubble 3/27 = 11.1%" in facts
    assert "87.3 GB of states and 4.8 GB of activations on the first stage, 92.1 GB in all" in facts


@pytest.mark.parametrize(("cluster", "said"), [("a100_x8", "fast"), ("a100_x8_25gbe", "slow")])
def test_the_rule_for_networks_is_reversed(cluster: str, said: str) -> None:
    """13B on four nodes: a slow network wants the pipeline across the nodes, a fast one none."""
    sizes = "model.model.num_layers=40 model.model.hidden_size=5120 model.model.num_heads=40 data.length=2048"
    words = ["model=gpt", *sizes.split(), "model.model.vocab_size=51200", "batch.global_size=512"]
    answer = answered([*words, f"cluster={cluster}", "cluster.nodes=4", "bytes_recipe=bf16_master"])
    assert answer.rule is not None
    step = answer.rule.steps[3]
    assert step.decision.startswith(f"{said}: the rule says")
    assert "which is reversed here" in step.decision
    assert f"the time of the step wants {'more' if said == 'slow' else 'less'} pipeline" in step.decision


def test_the_text_says_what_it_is(article: Answer) -> None:
    text = str(article)
    assert text.count("estimate, not measured") >= 4
    assert "± 20%" in text
    assert "paste: strategy=default strategy.data_parallel_size=" in text
    assert "Rejected" in text
    assert article.rank is not None
    assert article.found is not None
    assert f"the mesh of gpt3_175b as it is: place {article.rank} of {len(article.found.times)} that fit, " in text
    assert article.rank > 3
    assert article.look is not None
    given = article.look.given
    assert (given.as_dict()["memory_rank"], given.as_dict()["in_flight"]) == (0, 4)
    assert "\n    GB on pipeline rank 0, 4 micro-batches in flight: parameters " in str(given)
    assert "nodes of 8 devices" in text


def test_devices_that_a_training_would_take_are_told_where_others_are_planned_for() -> None:
    told = "trainer.devices x trainer.num_nodes is 4, which num_devices=4 would plan for"
    assert told in str(answered(["recipe=demo", "trainer.devices=4"]))
    assert "num_devices" not in str(answered(["recipe=demo", "trainer.devices=4", "num_devices=4"]))


def test_what_is_pasted_makes_the_same_mesh(article: Answer) -> None:
    assert article.found is not None
    best = article.found.best[0]
    pasted = shlex.split(overrides(best, article.request))
    base = [word for word in GPT_175B if not word.startswith(("strategy", "batch.micro"))]
    again = answered([*base, *pasted, "evaluate=true"])
    assert again.look is not None
    assert again.look.given.mesh == best.mesh
    assert again.look.given.step_seconds == pytest.approx(best.step_seconds)
    assert again.look.given.needed_bytes == pytest.approx(best.needed_bytes)
    assert again.found is None


def test_accumulated_batches_are_cut_one_by_one() -> None:
    """16 samples are 8 for each of 2 data ranks, which the pipeline cuts into 8; four such batches stay so."""
    words = ["recipe=demo", "batch.micro_size=null", "evaluate=true"]
    one, four = (answered([*words, f"trainer.accumulate_grad_batches={count}"]).look for count in (1, 4))
    assert one is not None
    assert four is not None
    assert (one.given.batch.micro_size, one.given.microbatches) == (1, 8)
    assert four.given.batch == BatchShape(global_size=64, micro_size=1)
    assert four.given.microbatches == 32
    assert four.given.memory.activations == one.given.memory.activations
    with pytest.raises(BatchError, match="micro_size=2 does not divide the 3 samples"):
        answered([*words, "batch.global_size=6", "batch.micro_size=2", "trainer.accumulate_grad_batches=2"])


def test_what_is_pasted_has_no_accumulation() -> None:
    """Eight data ranks share out the samples of a step, but not the four of each of its batches."""
    words = ["recipe=demo", "batch.global_size=4", "trainer.accumulate_grad_batches=4"]
    searched = answered(words)
    assert searched.found is not None
    best = searched.found.best[0]
    assert best.mesh.data_parallel_size == 8
    pasted = shlex.split(overrides(best, searched.request))
    assert {"batch.global_size=16", "trainer.accumulate_grad_batches=1"} <= set(pasted)
    again = answered([*words, *pasted, "evaluate=true"])
    assert again.look is not None
    assert again.look.given == best


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe=gpt2_124m", "cluster=workstation", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"] == "estimate, not measured"
    assert len(found["steps"]) == 5
    assert found["best"][0]["fits"]
    assert found["best"][0]["overrides"].startswith("strategy=default")
    assert found["best"][0]["step_seconds"] == pytest.approx(sum(found["best"][0]["time_seconds"].values()))


def test_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe=demo", "evaluate=true"]) == 0
    text = capsys.readouterr().out
    assert "data 2 x pipeline 2 x tensor 2, ZeRO 1" in text
    assert "all_reduce      tensor_parallel" in text
    assert "Best of" not in text


def test_told_layers_of_several_stages_on_a_rank() -> None:
    stages = ["strategy.pipeline_schedule=interleaved1f1b", "strategy.stages_per_rank=2"]
    look = answered(["recipe=demo", *stages, "strategy.layers_per_stage=[1,1,1,1]", "evaluate=true"]).look
    assert look is not None
    assert look.given.mesh.layers_per_stage == (1, 1, 1, 1)
    assert look.given.fits


@pytest.mark.parametrize("word", ["top=3", "trial=3", "picture={}/plan.png"])
def test_nothing_fits(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to try or to draw then."""
    words = [*GPT_175B[:9], "cluster=workstation", "strategy=ddp", "batch.micro_size=1", word.format(tmp_path)]
    assert run(words) == 1
    assert "nothing fits; what needs least:" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_module_that_was_traced() -> None:
    block = Part(parameters=10**6, matmul_flops=2e9, rows=1000, width=100)
    traced = BlockModel(blocks=(block,) * 4, first=Part(parameters=10), last=Part(parameters=10, matmul_flops=1e3))
    words = ["model.model._target_=torch.nn.Linear", "cluster=workstation", "bytes_recipe=fp32"]
    cfg = compose_run(words, config_name="plan")
    answer = plan(cfg, trace=lambda _: traced)
    assert answer.parameters == 4 * 10**6 + 20
    assert answer.found is not None
    assert answer.found.best
    with pytest.raises(ConfigError, match="is no reference decoder"):
        plan(cfg)


@pytest.mark.parametrize(
    ("precision", "recipe"), [("32-true", "fp32"), ("bf16-mixed", "autocast"), ("64-true", "fp64")]
)
def test_the_recipe_follows_from_the_precision(precision: str, recipe: str) -> None:
    assert recipe_of(compose_run([f"trainer.precision={precision}"], config_name="plan")) == recipe


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.nodez=2"],
        ["bytes_recipe=bf16"],
        ["batch.global_size=null"],
        ["strategy=ddp", "evaluate=true"],
        ["+cluster.memories=3"],
    ],
)
def test_one_clear_error(words: list[str]) -> None:
    with pytest.raises(Lightning3DError):
        answered(words)


@pytest.mark.parametrize(
    ("word", "fact"),
    [
        ("space.schedules=[1f1b,interleaved_1f1b]", r"space\.schedules: 'interleaved_1f1b' .* mean interleaved1f1b\?"),
        ("space.activation_checkpointing=[ful]", r"space\.activation_checkpointing: 'ful' .* mean full\?"),
    ],
)
def test_a_word_that_does_not_exist_is_not_priced(word: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        answered(["recipe=demo", word])


IMPOSSIBLE = [
    (["strategy.pipeline_parallel_size=3"], "pipeline 3 x tensor 2 does not divide the 8 devices"),
    (["strategy.tensor_parallel_size=8", "strategy.pipeline_parallel_size=1"], "does not divide 4 heads"),
    (["strategy.pipeline_parallel_size=8", "strategy.tensor_parallel_size=1"], "4 blocks cannot fill 8 stages"),
    (["batch.global_size=18"], "micro_size=2 does not divide the 9 samples"),
    (["batch.global_size=17"], "does not divide into 2 data ranks"),
    (["strategy.data_parallel_size=64"], "the mesh has 256 ranks"),
]


@pytest.mark.parametrize(("words", "fact"), IMPOSSIBLE, ids=[words[0] for words, _ in IMPOSSIBLE])
def test_an_impossible_mesh_is_refused_or_told(words: list[str], fact: str) -> None:
    with pytest.raises(Lightning3DError, match=fact) as refused:
        answered(["recipe=demo", *words, "evaluate=true"])
    assert refused.value.valid is not None
    assert refused.value.fix is not None
    searched = answered(["recipe=demo", *words])
    assert fact in searched.place
    assert f"the mesh of demo as it is: impossible: {searched.problem}" in str(searched)


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert run(["recipe=gpt2_124m", "cluster=a100_x8", f"picture={path}"]) == 0
    assert f"picture {path}" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")
