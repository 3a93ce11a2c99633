"""What most calls of the pool need, imported once by the process that workers are forked from."""

import gc
import importlib
import pkgutil

import torch.distributed.fsdp  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import lightning_3d

for _module in pkgutil.walk_packages(lightning_3d.__path__, "lightning_3d."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
# Looked through by no worker's collector, so that they share its memory.
gc.collect()
gc.freeze()
