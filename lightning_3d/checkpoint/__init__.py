"""Checkpoints: metadata as plain data (`containers`), whole or not at all (`files`, `agreement`), names and layouts.

`layout` and `optimizers` say what a module's and an optimizer's tensors are called and how they are cut, `members`
which parameters an optimizer has, `packed` keeps the original order where the tensor axis changed it, `absent` stands
for what other pipeline ranks hold, `gathering` makes tensors whole, `tensors` speaks to torch.distributed.checkpoint,
`store` saves a checkpoint, `restore` loads one.
"""
