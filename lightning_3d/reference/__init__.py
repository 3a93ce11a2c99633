"""Reference models, a language-model module and text data: plain Lightning, without a word of meshes."""

from lightning_3d.reference.gpt import GPT
from lightning_3d.reference.language_model import LanguageModel
from lightning_3d.reference.llama import Llama
from lightning_3d.reference.optim import decay_groups, warmup_cosine
from lightning_3d.reference.text import TextDataModule

__all__ = ["GPT", "LanguageModel", "Llama", "TextDataModule", "decay_groups", "warmup_cosine"]
