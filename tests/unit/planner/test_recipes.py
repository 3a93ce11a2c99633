"""Every recipe is planned for its own cluster: its mesh fits and is near the best, and the page on recipes says so."""

from functools import lru_cache
from pathlib import Path

import pytest

from lightning_3d.config.compose import compose_run
from lightning_3d.config.search import recipe_files
from lightning_3d.dryrun.tracing import model_of
from lightning_3d.planner.command import Answer, plan
from lightning_3d.planner.request import Request, read_request
from tests.marks import more

ROOT = Path(__file__).parents[3]
# What is traced takes seconds.
SLOW = ("bert_large", "mixtral_8x7b")
NEAR = 0.1
# Not chosen for speed: the mesh of an article, and one that shows all three axes.
AS_TOLD = {"gpt3_175b": (16, 4, 8), "demo": (2, 2, 2)}


@lru_cache(maxsize=2)
def answered(recipe: str) -> Answer:
    return plan(compose_run([f"recipe={recipe}"], config_name="plan"), trace=model_of)


@pytest.mark.parametrize("recipe", recipe_files())
def test_every_recipe_has_a_cluster_which_the_command_line_changes(recipe: str) -> None:
    cfg = compose_run([f"recipe={recipe}"], config_name="dryrun")
    assert cfg.cluster.nodes == cfg.trainer.num_nodes
    other = compose_run([f"recipe={recipe}", "cluster=h200_x8", "cluster.nodes=3"]).cluster
    assert (other.name, other.nodes) == ("h200_x8", 3)


@pytest.mark.parametrize("recipe", [more(name) if name in SLOW else name for name in recipe_files()])
def test_its_mesh_fits_and_is_near_the_best(recipe: str) -> None:
    if recipe in SLOW or recipe == "vit_l16":
        pytest.importorskip("transformers")
    answer = answered(recipe)
    assert answer.look is not None
    assert answer.look.given.fits
    assert answer.found is not None
    assert answer.rank is not None
    assert answer.slower is not None
    line = f"place {answer.rank} of {len(answer.found.times)} that fit"
    assert f"the mesh of {recipe} as it is: {line}" in str(answer)
    if recipe in AS_TOLD:
        mesh = answer.look.given.mesh
        assert (mesh.data_parallel_size, mesh.pipeline_parallel_size, mesh.tensor_parallel_size) == AS_TOLD[recipe]
        assert answer.slower > NEAR
        assert f"{answer.slower:.1%} slower than the best" in answer.place
    else:
        assert answer.slower <= NEAR


def row(recipe: str, request: Request) -> tuple[str, ...]:
    """The columns of the page that the files say."""
    assert request.given is not None
    return (
        f"`{recipe}`",
        f"{request.devices} of `{request.cluster.name}`",
        str(request.given.mesh),
        f"{request.given.batch.micro_size} x {request.given.microbatches}",
        request.given.kind,
    )


def test_the_page_on_recipes_says_what_the_files_do() -> None:
    lines = (ROOT / "docs" / "recipes.md").read_text().splitlines()
    told = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| `")]
    found = [row(name, read_request(compose_run([f"recipe={name}"], config_name="plan"))) for name in recipe_files()]
    assert sorted((cells[0], *cells[2:6]) for cells in told) == found
