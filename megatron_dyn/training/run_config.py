# SPDX-License-Identifier: Apache-2.0
"""One run's settings together, checked against each other, and the planner's settings that follow from them."""

import dataclasses
from dataclasses import dataclass, field

from megatron_dyn.planning import CostModel, PlanConfig
from megatron_dyn.planning.config import INT32_MAX
from megatron_dyn.training.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    LoggingConfig,
    OptimizerSettings,
    ParallelConfig,
    TrainingConfig,
    require,
)
from megatron_dyn.training.model_config import ModelConfig, check_model_parallel
from megatron_dyn.training.overlap import Fp8Config, OverlapConfig, check_overlap
from megatron_dyn.training.plan_from_settings import cost_model, planner_config


@dataclass(kw_only=True)
class RunConfig:
    """One training run."""

    model: ModelConfig
    parallel: ParallelConfig
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    data: DataConfig
    optimizer: OptimizerSettings
    training: TrainingConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig

    def __post_init__(self) -> None:
        model, parallel, training = self.model, self.parallel, self.training
        decay = self.optimizer.lr_decay_iters or training.train_iters
        warmup = self.lr_warmup_iters
        require(
            warmup < decay,
            f"a warmup of {warmup} steps leaves nothing of the {decay} steps of the learning rate's schedule: shorten it",
        )
        annealing = self.optimizer.lr_wsd_decay_iters
        require(
            annealing is None or warmup + annealing <= decay,
            f"warmup ({warmup}) and annealing (--lr-wsd-decay-iters {annealing}) do not fit into the {decay} steps of the schedule",
        )
        require(
            self.optimizer.optimizer == "adam" or not parallel.use_distributed_optimizer,
            f"--optimizer {self.optimizer.optimizer} with --use-distributed-optimizer: Megatron-Core distributes Adam only; leave one out",
        )
        require(
            parallel.pipeline_model_parallel_size > 1 or not self.logging.measure_pipeline_bubble,
            "--measure-pipeline-bubble without a pipeline: there is no neighbour to wait for and nothing would be measured; give "
            "--pipeline-model-parallel-size 2 or more, or leave it out",
        )
        try:
            check_model_parallel(model, parallel)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        check_overlap(self)
        stand_in = dict(max_tokens_per_microbatch=INT32_MAX // 2) if self.data.finds_budget else {}
        self.plan_config(data_parallel_size=1, **stand_in)  # refuses what makes no plan possible

    @property
    def precision(self) -> str:
        """'bf16' or 'fp32'."""
        return "bf16" if self.training.bf16 else "fp32"

    @property
    def lr_warmup_iters(self) -> int:
        """Steps of warmup, however they were given."""
        decay = self.optimizer.lr_decay_iters or self.training.train_iters
        if self.optimizer.lr_warmup_fraction is not None:
            return int(self.optimizer.lr_warmup_fraction * decay)
        return self.optimizer.lr_warmup_iters

    def cost_model(self, vocab_size: int = 0) -> CostModel:
        """What pieces cost: measured coefficients where a file is given, else the model's operations.

        Args:
            vocab_size: the vocabulary without the rows that pad it; 0 leaves the output projection out.

        Raises:
            ConfigError: The file cannot be used.
        """
        return cost_model(self.model, cost_file=self.data.cost_file, vocab_size=vocab_size)

    def plan_config(self, *, data_parallel_size: int, cost: CostModel | None = None, **changes) -> PlanConfig:
        """The planner's settings.

        Args:
            data_parallel_size: Copies of the model.
            cost: What pieces cost (none: the model's operations without its vocabulary, where balance does not matter).
            **changes: Fields of `PlanConfig` to set otherwise (validation reads its documents in stored order).

        Raises:
            ConfigError: The settings make no plan possible.
        """
        return planner_config(
            vars(self.data),
            self.parallel,
            data_parallel_size=data_parallel_size,
            seed=self.training.seed,
            fp8=self.fp8.fp8 is not None,
            cost=self.cost_model() if cost is None else cost,
            **changes,
        )

    def with_budget(self, tokens: int) -> "RunConfig":
        """This run with a budget that was found."""
        return dataclasses.replace(self, data=dataclasses.replace(self.data, max_tokens_per_microbatch=tokens))

    def as_dict(self) -> dict:
        """Nested plain values, e.g. for a checkpoint's record of how it was made."""
        return dataclasses.asdict(self)
