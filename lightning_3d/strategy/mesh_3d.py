"""Mesh3DStrategy: Lightning's hooks in the order in which Lightning calls them, each a call downwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ModuleError
from lightning_3d.mesh.spec import MODEL_GROUP
from lightning_3d.strategy.explaining import ExplainingStrategy
from lightning_3d.strategy.setup.begun import BegunLoaders
from lightning_3d.strategy.setup.optimizers import check_separable, reads_loss

# What only a run needs is imported when it begins: naming the strategy should cost a program little.
if TYPE_CHECKING:
    from lightning_3d.initial.replay import InitTape
    from lightning_3d.strategy.life import AppliedModule
    from lightning_3d.strategy.logging.logged import LoggedValues
    from lightning_3d.strategy.steps.evaluation import Evaluator
    from lightning_3d.strategy.steps.runner import BatchRunner


class Mesh3DStrategy(ExplainingStrategy):
    """Trains an unmodified LightningModule on a data x pipeline x tensor mesh, with the numbers of one device.

    All arguments are keyword-only and plain values, so that Hydra and LightningCLI can build the strategy. Precision
    comes from ``Trainer(precision=...)``, or ``plugins=Mesh3DPrecision("bf16-master")``.

    Args:
        data_parallel_size: Degree of the data axis; ``"auto"`` = world / (pipeline x tensor).
        pipeline_parallel_size: Degree of the pipeline axis.
        tensor_parallel_size: Degree of the tensor axis.
        data_replicate_size: Replicas inside the data axis; each is cut in data / replicas shards (hybrid sharding).
        zero_stage: What is sharded over the data axis: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
        unit_blocks: Blocks that gather and reduce together.
        cpu_offload: Keep shards and optimizer state in host memory.
        micro_batch_size: Samples per micro-batch and data rank.
        num_microbatches: Micro-batches per batch; ``"auto"`` follows from ``micro_batch_size``.
        pipeline_schedule: Order of micro-batches through the stages.
        stages_per_rank: Stages that one pipeline rank owns.
        layers_per_stage: Blocks of each stage; None = balanced by counted cost.
        pipeline_stack: Name, or list of names, of the module list that is cut into stages.
        sequence_parallel: Shard the sequence between tensor-parallel regions.
        tensor_plan: Styles of modules by glob, over those that are found.
        pad_vocabulary: Pad the vocabulary so that the tensor degree divides it.
        replay: Record blocks once and replay them.
        layout_free_random: Random streams per drawing module, so that dropout does not depend on the layout.
        tensor_random: ``"derived"`` streams per shard, or ``"exact"`` masks of one device.
        activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        compile: Compile each block; on the tensor axis what was recorded of it.
        uneven: At uneven ends of training data: ``"stop"`` all data ranks together, or ``"error"``.
        on_nonfinite: Losses and gradients that are not finite: ``"none"``, ``"skip"`` or ``"raise"``, on all ranks.
        pretrained: Directory of weights that are streamed into the shards.
        pretrained_strict: Names in ``pretrained`` that match nothing are an error.
        rank_order: Order of the axes over the ranks, outermost first.
        save_distributed_checkpoint: Save a sharded directory; False = one consolidated file.
        async_save: Write checkpoints in the background.
        check_replicas: Compare what must be equal on several ranks.
        explain: Print the plan before training.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``; ``"auto"`` forks in notebooks only.
        process_group_backend: Backend of the process group; None = by device.
        timeout_seconds: Longest wait in a collective, in seconds.

    Raises:
        ConfigError: An option has an impossible value; all of them are listed.
    """

    def __init__(
        self,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_replicate_size: int = 1,
        zero_stage: int = 1,
        unit_blocks: int = 1,
        cpu_offload: bool = False,
        micro_batch_size: int | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_schedule: str = "1f1b",
        stages_per_rank: int | Literal["auto"] = "auto",
        layers_per_stage: list[int] | None = None,
        pipeline_stack: str | list[str] | None = None,
        sequence_parallel: bool = False,
        tensor_plan: dict[str, str] | None = None,
        pad_vocabulary: bool = False,
        replay: bool = True,
        layout_free_random: bool = True,
        tensor_random: str = "derived",
        activation_checkpointing: str = "none",
        compile: bool = False,  # noqa: A002 (the public name)
        uneven: str = "stop",
        on_nonfinite: str = "none",
        pretrained: str | None = None,
        pretrained_strict: bool = True,
        rank_order: str = "data,pipeline,tensor",
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        check_replicas: bool = False,
        explain: bool = False,
        start_method: str = "auto",
        process_group_backend: str | None = None,
        timeout_seconds: float = 300,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(StrategyConfig(**options).check())
        self._tape: InitTape | None = None
        self._applied: AppliedModule | None = None
        self._begun_loaders = BegunLoaders()
        self._runner: BatchRunner | None = None
        self._logged: LoggedValues | None = None
        self._evaluator: Evaluator | None = None

    # ---- the module ----

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: builds on the meta device and records how parameters are initialised."""
        from lightning_3d.initial.record import InitRecorder
        from lightning_3d.strategy.life import check_untouched

        recorder = InitRecorder(self._on_mesh.seed)
        with recorder:
            yield
        module = self.lightning_module
        assert module is not None
        # On the mesh already, it has on the meta device what other pipeline ranks hold.
        known = self._applied is not None and self._applied.module is module
        if not known and any(parameter.is_meta for parameter in module.parameters()):
            check_untouched(module)
            self._tape = recorder.tape(module)

    @override
    def setup(self, trainer: Trainer) -> None:
        from lightning_3d.strategy.life import optimizer_parameters, watch_module
        from lightning_3d.strategy.logging.logged import LoggedValues
        from lightning_3d.strategy.logging.metrics import MetricDoors
        from lightning_3d.strategy.run import evaluate_without_inference_mode
        from lightning_3d.strategy.setup.pretrained import read_pretrained
        from lightning_3d.strategy.steps.evaluation import Evaluator
        from lightning_3d.strategy.steps.runners import make_runner, relay_of

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        evaluate_without_inference_mode(trainer)
        self._on_mesh.dealer.take_over(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            datamodule = getattr(trainer, "datamodule", None)
            self._on_mesh.checkpoints.check_hyper_parameters(self.lightning_module, datamodule)
        run, before, applied = self._on_mesh, self._applied, self._apply()
        # One that ran before, or that a checkpoint was loaded into, has its weights.
        if applied is not before:
            read_pretrained(applied, self.config, run.world_group)
        watch_module(applied, run, self.config, normalise=self._layer_sync is not None)
        applied.doors.open()
        run.callbacks.open(trainer)
        relay = relay_of(applied, run)
        metrics = MetricDoors(applied.module, run.data_group, relay)
        self._logged = LoggedValues(applied.module, run.named, metrics, applied.module.log)
        self._logged.open()
        self._runner = make_runner(
            applied,
            run,
            self._precision,
            config=self.config,
            trained=lambda: optimizer_parameters(self.optimizers),
            relay=relay,
            metrics=metrics,
        )
        self._precision.before_backward_hooks = self._runner.gradients_arrived
        self._precision.backward_context = applied.engine.backward
        self._precision.before_step = run.finite.before_step
        run.clipper.share = applied.engine.share
        self._evaluator = Evaluator(
            applied.module, self._runner, ends=run.ends, precision=self._precision, logged=self._logged
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self.config.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _apply(self) -> AppliedModule:
        """Makes the connected module this rank's part of it, once in its life."""
        from lightning_3d.batches.micro import MicroBatches
        from lightning_3d.strategy.life import apply_module
        from lightning_3d.strategy.setup.first_step import take_first_step
        from lightning_3d.strategy.setup.refusals import refuse_own_training

        module = self.lightning_module
        assert module is not None
        pipelined = self.mesh_spec.pipeline > 1
        if pipelined and module.trainer.state.fn == TrainerFn.FITTING:
            refuse_own_training(module)
        if self._applied is None or self._applied.module is not module:
            step = None
            planned = self.mesh_spec.size(MODEL_GROUP) > 1
            if planned or self.counts_flops:
                cut = MicroBatches(module, self.config) if pipelined else None
                run, rank = self._on_mesh, self.data_rank
                step = take_first_step(module, run, self._precision, data_rank=rank, cut=cut, needed=planned)
            if step is not None:
                self._on_mesh.same_batches.shapes(step.args[0])
                self._count_flops(module, step)
                # Not the step itself: its batch must not live as long as the run.
                self._begun_loaders = step.begun
            self._applied = apply_module(
                module,
                self._on_mesh,
                spec=self.mesh_spec,
                config=self.config,
                precision=self._precision,
                tape=self._tape,
                step=step,
            )
            self._tape = None
            self._explain_if_asked()
        return self._applied

    @property
    def _module_on_mesh(self) -> AppliedModule:
        if self._applied is None:
            raise ModuleError(
                "no module is set up on the mesh yet.", fix="call it after trainer.fit, validate, test or predict began"
            )
        return self._applied

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        from lightning_3d.strategy.life import check_optimizers

        self._reset_optimizers_and_schedulers()
        applied = self._module_on_mesh
        with applied.doors.absent.shown(self.root_device):
            super().setup_optimizers(trainer)
        applied.doors.absent.take_out(self.optimizers)
        check_optimizers(applied.module, self.optimizers)
        if self.mesh_spec.pipeline > 1:
            check_separable(self.optimizers)

    @override
    def model_to_device(self) -> None:
        """Nothing to do: the plan places the module where it belongs."""

    @override
    def teardown(self) -> None:
        from lightning_3d.plan import unwatch_calls

        if self._applied is not None:
            self._applied.engine.rest()
            unwatch_calls(self._applied.module)
            if self._logged is not None:
                self._logged.close()
            self._applied.doors.close()
        super().teardown()

    # ---- steps ----

    @property
    def _steps(self) -> BatchRunner:
        assert self._runner is not None, "Lightning runs steps after setup"
        return self._runner

    @property
    def _evaluation(self) -> Evaluator:
        assert self._evaluator is not None, "Lightning runs steps after setup"
        return self._evaluator

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        plain = super().backward
        return self._steps.backward(closure_loss, lambda loss: plain(loss, optimizer, *args, **kwargs))

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def divided() -> Any:
            result = closure()
            self._steps.before_optimizer_step()
            if self._on_mesh.finite.looks:
                unscaled = self._precision.scaler is None
                self._on_mesh.finite.look(result, self._module_on_mesh.module, optimizer, gradients=unscaled)
            if isinstance(result, Tensor) and reads_loss(optimizer):
                return self._on_mesh.collectives.reduce(result, None, "mean")
            return result

        stepped = super().optimizer_step(optimizer, divided, model, **kwargs)
        self._steps.after_optimizer_step()
        return stepped

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients stay on their rank as far as the ZeRO stage lets them: the step comes later."""
        self._steps.synchronise(False)
        try:
            yield
        finally:
            self._steps.synchronise(True)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step("validation", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step("test", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step("predict", args)

    @override
    def on_validation_start(self) -> None:
        self._listen()
        applied = self._module_on_mesh
        applied.share_buffers()
        applied.copies.bring_buffers()
        self._on_mesh.ends.begin_evaluation(applied.module.trainer)

    @override
    def on_validation_end(self) -> None:
        self._on_mesh.ends.end_evaluation()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # ---- what must be equal ----

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.config.check_replicas:
            self._on_mesh.same_batches.batch(batch, batch_idx)

    @override
    def on_train_end(self) -> None:
        if self.config.check_replicas:
            applied = self._module_on_mesh
            applied.engine.rest()
            held = chain(applied.module.named_parameters(), applied.module.named_buffers())
            self._on_mesh.same_tensors.tensors(held)

    # ---- data ----

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        assert trainer.state.stage is not None
        self._on_mesh.same_batches.lengths(dataloader, trainer.state.stage.value)
        begun = self._begun_loaders.take(dataloader)
        dealt = self._on_mesh.dealer.deal(dataloader, trainer.state.stage.value, fill=trainer.training)
        return self._on_mesh.ends.process(
            self._on_mesh.places.follow(begun if dealt is dataloader else dealt, trainer),
            trainer,
            lambda batch, at: self._evaluation.repeat(batch, at, self.batch_to_device),
        )
