"""Hugging Face models that are fine-tuned from a local directory, on meshes and on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.parity.models import LENGTH, VOCABULARY, NextToken
from tests.spmd.fits import QUIET, loader, share
from tests.spmd.tensor_runs import tokens

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
# Without dropout, whose masks are others in plain Lightning.
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "mixtral": lambda: transformers.MixtralConfig(**_LLAMA, num_local_experts=4),
    "odd": lambda: transformers.GPT2Config(**{**_GPT2, "vocab_size": VOCABULARY + 1}),
}


def model_of(kind: str, seed: int) -> Any:
    """Returns a tiny causal model with random weights."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())


def save_model(kind: str, directory: Path, size: str = "20KB") -> dict[str, Tensor]:
    """Saves a model in several files and returns its state."""
    model = model_of(kind, seed=11)
    model.save_pretrained(directory, max_shard_size=size)
    return {name: value.clone() for name, value in model.state_dict().items()}


class Tuned(NextToken):
    """Fine-tunes: the model comes from a directory, or is random when the strategy brings the weights."""

    def __init__(self, kind: str, directory: Path | None = None, late: bool = False) -> None:
        if late:
            model: Any = None
        elif directory is None:
            model = model_of(kind, seed=5)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        super().__init__(model)
        self.kind, self.late = kind, late

    def configure_model(self) -> None:
        if self.model is None:
            self.model = transformers.AutoModelForCausalLM.from_config(CONFIGS[self.kind]())


class Start(Callback):
    """Keeps the whole state with which training starts, and each loss."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.state = whole_state(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Returns copies of the module's whole state."""
    strategy: Any = trainer.strategy
    whole = strategy.full_state_dict() if isinstance(strategy, Mesh3DStrategy) else trainer.model.state_dict()
    return {name: value.clone() for name, value in whole.items()}


def tuned(
    rank: int,
    world: int,
    kind: str,
    strategy: dict[str, Any] | None,
    *,
    directory: Path | None = None,
    late: bool = False,
    epochs: int = 1,
    resume: Path | None = None,
    save: Path | None = None,
    precision: str = "32-true",
) -> dict[str, Any]:
    """Trains epochs of two batches and returns the state before, losses and the state after; None: plain Lightning."""
    L.seed_everything(2, verbose=False)
    start = Start()
    own = None if strategy is None else Mesh3DStrategy(**{"num_microbatches": 2, **strategy})
    trainer = L.Trainer(
        **QUIET,
        devices=world,
        strategy=own or "auto",
        max_epochs=epochs,
        use_distributed_sampler=False,
        callbacks=[start],
        **({"plugins": Mesh3DPrecision(precision)} if own is not None else {"precision": precision}),
    )
    group = (strategy or {}).get("pipeline_parallel_size", 1) * (strategy or {}).get("tensor_parallel_size", 1)
    mine = loader(share(batch, rank // group, world // group) for batch in tokens(2, samples=8))
    module = Tuned(kind, directory, late)
    # from_pretrained leaves a model in eval mode.
    trainer.fit(module.train(), mine, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return {"start": start.state, "losses": start.losses, "end": whole_state(trainer)}
