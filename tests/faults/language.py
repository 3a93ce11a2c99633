"""A language model to interrupt: nobody wrote it for parallelism, and every layout of a checkpoint meets in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.models import NextToken

SAMPLES, LENGTH = 80, 10
# Two ranks divide it and four do not, so that one mesh has to pad it.
WORDS = 94


class Sentences(torch.utils.data.Dataset[tuple[Tensor]]):
    """Sequences of token ids, the same in every process."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(9))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.ids[index],)


class Language(NextToken):
    """GPT-2 as Hugging Face has it, tied, with two parameter groups and a learning rate that changes in each step.

    Args:
        schedule: How many steps it is made for.
    """

    def __init__(self, schedule: int) -> None:
        super().__init__(gpt2())
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        parts: tuple[list[nn.Parameter], ...] = ([], [])
        for parameter in self.parameters():
            parts[parameter.dim() < 2].append(parameter)
        groups = [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def gpt2() -> nn.Module:
    """Returns four blocks without dropout, whose masks differ with the data degree."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)
