import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_3d.config.compose import compose_run, packaged_recipes, readable_errors, with_overrides
from lightning_3d.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "fact", "fix"),
    [
        ("strategy.zero_stge=1", "no key strategy.zero_stge", "strategy.zero_stage"),
        ("zero_stage=1", "no key zero_stage", "strategy.zero_stage"),
        ("trainer.max_step=1", "no key trainer.max_step", "trainer.max_steps"),
        ("recipee=demo", "no key recipee", "recipe"),
        ("recipe=dmo", "recipe=dmo does not exist", "recipe=demo"),
        ("strategy=zero5", "strategy=zero5 does not exist", "strategy=zero"),
        ("xyz=1", "no key xyz", "+xyz=... to add it"),
    ],
)
def test_unknown_names_get_the_nearest(override: str, fact: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fact) as caught:
        compose_run([override])
    assert str(caught.value.fix).startswith(fix)


def test_other_errors_of_hydra_keep_their_text() -> None:
    with pytest.raises(ConfigError, match=r"To sweep over it, add --multirun"):
        compose_run(["trainer.max_steps=1,2"])


def test_the_raw_error_is_there_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(HydraException):
        compose_run(["strategy.zero_stge=1"])


def test_a_user_has_recipes_and_groups_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "strategy").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /strategy: own\ntask_name: mine\n"
    )
    (tmp_path / "strategy" / "own.yaml").write_text("defaults: [default]\nunit_blocks: 3\n")
    cfg = compose_run(["recipe=mine"], config_dir=tmp_path)
    assert (cfg.task_name, cfg.strategy.unit_blocks) == ("mine", 3)


def test_hydras_store_is_left_as_it_was() -> None:
    store = ConfigStore.instance()
    store.store("theirs", {"a": 1}, group="recipe")
    before = dict(store.repo["recipe"])
    with packaged_recipes():
        assert set(store.repo["recipe"]) > set(before)
    assert store.repo["recipe"] == before
    del store.repo["recipe"]["theirs.yaml"]


def test_only_the_recipe_that_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = OmegaConf.load

    def noted(file: Any) -> Any:
        if "recipes" in str(file):
            read.append(Path(file).name)
        return load(file)

    monkeypatch.setattr(OmegaConf, "load", noted)
    assert compose_run(["recipe=gpt2_355m"]).task_name == "gpt2_355m"
    assert read == ["gpt2_355m.yaml"]


def test_the_command_line_answers_without_torch() -> None:
    imports = "import lightning_3d.config.compose, lightning_3d.train"
    code = f"import sys; sys.argv = ['lightning-3d']; {imports}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("target", "given", "told"),
    [
        ("builtins.open", {"file": "nothere.txt"}, "No such file or directory: 'nothere.txt'"),
        ("builtins.int", {"unknown": 1}, "TypeError: "),
    ],
)
def test_what_a_users_class_says_is_told_with_its_key(target: str, given: dict[str, object], told: str) -> None:
    cfg = OmegaConf.create({"data": {"_target_": target, **given}})
    with pytest.raises(ConfigError) as caught, readable_errors():
        instantiate(cfg.data)
    assert caught.value.fact.startswith("data cannot be made: ")
    assert told in caught.value.fact


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["x=1"]),
        (["--cfg", "job"], ["--cfg", "job", "x=1"]),
        (["--config-dir", "conf", "a=b", "c=d"], ["--config-dir", "conf", "x=1", "a=b", "c=d"]),
        (["a=b", "-m", "--config-dir", "conf"], ["x=1", "a=b", "-m", "--config-dir", "conf"]),
        (["-m", "recipe=tiny"], ["-m", "x=1", "recipe=tiny"]),
    ],
)
def test_overrides_stay_in_one_place(given: list[str], expected: list[str]) -> None:
    assert with_overrides(given, ["x=1"]) == expected
    assert with_overrides(given, []) == given
