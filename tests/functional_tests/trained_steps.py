# SPDX-License-Identifier: Apache-2.0
"""Training steps of the product on several ranks, taken apart far enough to be compared with the reference.

Documents go through the real Planner, build_microbatch and Stepper. What is returned is gathered: parameters and gradients of
this rank's stages, whole (over tensor-parallel ranks and over the distributed optimizer's shards), under their names in the
whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from launch import launch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from reference import Document, TinyGPT, Update, check_step, reference_steps
from whole_model import gather_gradients, gather_parameters, set_weights

import megatron_dyn.microbatch.builder as builder
from megatron_dyn import device
from megatron_dyn.layers import ThdAttention
from megatron_dyn.planning import Planner
from megatron_dyn.training.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OptimizerSettings,
    ParallelConfig,
    TrainingConfig,
)
from megatron_dyn.training.model import ModelConfig, build_model, transformer_config
from megatron_dyn.training.optimizer import build_optimizer, wrap_models
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.step import Stepper


class Documents:
    """A corpus in memory."""

    def __init__(self, documents: Sequence[Document]):
        self._documents = [np.array(document, dtype=np.int64) for document in documents]
        self.lengths = np.array([len(document) for document in documents], dtype=np.int64)
        self.fingerprint = "documents of a test"

    def __len__(self) -> int:
        return len(self._documents)

    def tokens(self, document: int, start: int, length: int) -> np.ndarray:
        return self._documents[document][start : start + length]

    def describe(self, document: int) -> str:
        return f"test corpus, document {document}"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a topology, and a few steps to train."""

    documents: tuple[Document, ...]
    budget: int
    batch: int
    """Documents a step."""
    gpt: TinyGPT
    steps: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    parallel: dict = field(default_factory=dict)
    """Other fields of ParallelConfig."""
    model: dict = field(default_factory=dict)
    """Other fields of ModelConfig."""
    packing: dict = field(default_factory=dict)
    """Other fields of DataConfig."""
    order_of_T: tuple[int, ...] | None = None
    """Run the microbatches in the order of these T (all different) instead of the plan's."""
    bf16: bool = False
    on_nan: str = "stop"
    update: Update = Update()

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def document_steps(self) -> tuple[tuple[Document, ...], ...]:
        """The documents of each step: without shuffling, the next ones."""
        return tuple(self.documents[step * self.batch : (step + 1) * self.batch] for step in range(self.steps))

    def run_config(self) -> RunConfig:
        gpt, update = self.gpt, self.update
        return RunConfig(
            model=ModelConfig(
                num_layers=gpt.layers,
                hidden_size=gpt.hidden,
                num_attention_heads=gpt.heads,
                num_query_groups=gpt.groups,
                ffn_hidden_size=gpt.ffn,
                normalization=gpt.norm,
                swiglu=gpt.swiglu,
                add_bias_linear=gpt.biases,
                qk_layernorm=gpt.qk_layernorm,
                position_embedding_type=gpt.positions,
                max_position_embeddings=gpt.max_positions,
                untie_embeddings_and_output_weights=not gpt.tied,
                make_vocab_size_divisible_by=8,
                **self.model,
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                sequence_parallel=self.sp,
                pipeline_model_parallel_size=self.pp,
                num_virtual_stages_per_pipeline_rank=self.vpp,
                **self.parallel,
            ),
            data=DataConfig(
                data_path=["in memory"],
                vocab_size=gpt.vocabulary,
                max_tokens_per_microbatch=self.budget,
                global_batch_size=self.batch,
                document_order="sequential",
                **self.packing,
            ),
            optimizer=OptimizerSettings(
                lr=update.lr,
                lr_decay_style="constant",
                weight_decay=update.weight_decay,
                adam_beta1=update.betas[0],
                adam_beta2=update.betas[1],
                adam_eps=update.eps,
                clip_grad=update.clip,
            ),
            training=TrainingConfig(train_iters=self.steps, bf16=self.bf16, on_nan=self.on_nan),
            checkpoint=CheckpointConfig(),
            logging=LoggingConfig(),
        )


def planner_of(scenario: Scenario) -> Planner:
    """The product's planner, as a rank would make it."""
    corpus = Documents(scenario.documents)
    config = scenario.run_config().plan_config(data_parallel_size=scenario.dp)
    return Planner(corpus.lengths, config, fingerprint=corpus.fingerprint)


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """What one rank holds after a step."""

    loss: float
    loss_tokens: int
    grad_norm: float
    updated: bool
    gradients: dict[str, torch.Tensor]
    """Before clipping."""
    parameters: dict[str, torch.Tensor]
    """After the update. Empty where the product gathers them only in the next step's forward pass: there its loss shows them."""
    planned_T: list[int]
    seen: list[list[dict]]
    """For each model chunk, the packing that its first layer's attention got, in order of the forward passes."""
    digest: str


class Run:
    """The parts of a scenario on this rank. Process groups of an earlier run in this process are given up."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.run = scenario.run_config()
        device.install_cpu_replacements()
        parallel_state.destroy_model_parallel()
        destroy_rerun_state_machine()
        parallel_state.initialize_model_parallel(
            scenario.tp, scenario.pp, self.run.parallel.virtual_pipeline_model_parallel_size
        )
        device.seed_everything(1)
        config = transformer_config(self.run.model, self.run.parallel, precision=self.run.precision)
        self.chunks = build_model(config, self.run.model, vocab_size=scenario.gpt.vocabulary, backend="local")
        set_weights(self.chunks)
        self.seen = [_watch(chunk) for chunk in self.chunks]
        self.models = wrap_models(self.chunks, config, self.run.parallel)
        optimizer, scheduler = build_optimizer(self.run, self.models)
        self.stepper = Stepper(self.models, optimizer, scheduler)
        self.corpus = Documents(scenario.documents)
        self.planner = planner_of(scenario)

    def microbatches(self, step: int):
        """This rank's part of a step."""
        plan = self.planner.plan(step)
        mine = plan.microbatches[parallel_state.get_data_parallel_rank()]
        if self.scenario.order_of_T is not None:
            mine = sorted(mine, key=lambda planned: self.scenario.order_of_T.index(planned.T))
        return plan, [
            builder.build_microbatch(planned, self.corpus, step=step, index=index) for index, planned in enumerate(mine)
        ]

    def train(self, step: int) -> RankStep:
        """One step, observed."""
        gathered_late = self.run.parallel.overlap_param_gather and step < self.scenario.steps - 1
        for seen in self.seen:
            seen.clear()
        plan, microbatches = self.microbatches(step)
        with _gradients_before_clipping(self.stepper) as gradients:
            outcome = self.stepper.train(microbatches, loss_tokens=plan.num_loss_tokens)
        return RankStep(
            loss=outcome.loss.mean,
            loss_tokens=outcome.loss.tokens,
            grad_norm=outcome.grad_norm,
            updated=outcome.updated,
            gradients=gradients,
            parameters={} if gathered_late else gather_parameters(self.models),
            planned_T=[microbatch.T for microbatch in microbatches],
            seen=[list(seen) for seen in self.seen],
            digest=plan.digest,
        )


def train_scenario(rank: int, world: int, scenario: Scenario) -> list[RankStep]:
    """Job of one rank."""
    run = Run(scenario)
    return [run.train(step) for step in range(scenario.steps)]


def check_scenario(scenario: Scenario, results: list[list[RankStep]]) -> None:
    """Every step on every rank against the reference."""
    expected = reference_steps(scenario.gpt, scenario.document_steps(), update=scenario.update)
    for step in range(scenario.steps):
        ranks = [result[step] for result in results]
        assert len({rank.digest for rank in ranks}) == 1, f"step {step}: the ranks hold different plans"
        check_step(ranks, expected[step])


def launch_scenario(scenario: Scenario, *, timeout: float = 120.0) -> list[list[RankStep]]:
    """Steps of each rank."""
    return launch(scenario.world, train_scenario, scenario, timeout=timeout)


class _gradients_before_clipping:
    """Context: the gradients as they are when the product asks for their norm for the first time."""

    def __init__(self, stepper: Stepper):
        self.stepper = stepper

    def __enter__(self) -> dict[str, torch.Tensor]:
        optimizer, gradients = self.stepper.optimizer, {}
        original = optimizer.get_grad_norm

        def observed():
            if not gradients:
                gradients.update(gather_gradients(self.stepper.models))
            return original()

        optimizer.get_grad_norm = observed
        return gradients

    def __exit__(self, *error) -> None:
        del self.stepper.optimizer.get_grad_norm


def _watch(chunk) -> list[dict]:
    """A list that grows by the packing of each forward pass, as the attention of the chunk's first layer gets it."""
    seen: list[dict] = []

    def note(module: ThdAttention, args, kwargs) -> None:
        params = kwargs["packed_seq_params"]
        seen.append(
            {
                "T": args[0].size(0),
                "cu_seqlens": params.cu_seqlens_q.tolist(),
                "cu_seqlens_padded": params.cu_seqlens_q_padded.tolist(),
                "max_seqlen": params.max_seqlen_q,
            }
        )

    chunk.decoder.layers[0].self_attention.core_attention.register_forward_pre_hook(note, with_kwargs=True)
    return seen
