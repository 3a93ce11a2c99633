"""A user's own program under Hydra, over the packaged configuration."""

import hydra
from omegaconf import DictConfig

from lightning_3d.config.compose import packaged_recipes
from lightning_3d.config.search import conf_dir
from lightning_3d.train.job import train
from lightning_3d.train.prepare import prepare


@hydra.main(config_path=str(conf_dir()), config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> float | None:
    prepare(cfg)
    return train(cfg)


if __name__ == "__main__":
    with packaged_recipes():
        main()
