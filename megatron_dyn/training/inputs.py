# SPDX-License-Identifier: Apache-2.0
"""What a run reads and runs on: opened and checked without other ranks, so that a refusal comes before a process group exists."""

import importlib.util

from megatron_dyn import device
from megatron_dyn.corpus import Corpus, CorpusSplits, open_corpus
from megatron_dyn.planning import PlanConfig, Planner, PlanError
from megatron_dyn.planning.config import INT32_MAX
from megatron_dyn.training.config import ConfigError
from megatron_dyn.training.distributed import rank_from_environment, world_size_from_environment
from megatron_dyn.training.folders import require_continuation, require_writable
from megatron_dyn.training.model_config import check_positions
from megatron_dyn.training.plan_from_settings import in_flags, vocabulary
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.userbuffers.choice import choose_backend


class Inputs:
    """What the run reads, opened and checked: documents, tokenizer, plans; and the device. Needs no process group.

    Args:
        run: Settings.

    Raises:
        ConfigError, CorpusError, PlanError: The inputs are missing, broken or do not fit the settings.
    """

    def __init__(self, run: RunConfig):
        self.folders = {"--run-dir": run.logging.run_dir, "--save": run.checkpoint.save}
        for flag, folder in self.folders.items():
            require_writable(flag, folder)
        require_continuation(run.checkpoint)
        try:
            self.process_group_backend = process_group_backend(run)
            self.device = device.initialize_device(backend=self.process_group_backend)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.layers = layers_for(run)
        data = run.data
        vocab_size, tokenizer = vocabulary(data.tokenizer_model, data.vocab_size)
        self.vocab_size: int = vocab_size
        specials = (tokenizer.pad, tokenizer.eod) if tokenizer else ()
        self.pad_token_id = next((token for token in specials if token is not None), 0)
        # Tensor parallelism counts ranks first, so that the first of each group is a multiple of its size.
        self.broadcasts_tokens = data.data_broadcast
        self.reads_tokens = not data.data_broadcast or rank_from_environment() % run.parallel.tensor_model_parallel_size == 0
        self.splits: CorpusSplits = open_corpus(
            data.data_path, split=data.split, seed=run.training.seed, vocab_size=self.vocab_size, read_tokens=self.reads_tokens
        )
        self.data_parallel_size = run.parallel.data_parallel_size(world_size_from_environment())
        if self.splits.train is None:
            raise ConfigError(f"--split {data.split} leaves no document to train on: give training a share")
        self.budget: int | None = None
        """B, once it is known."""
        self.planner: Planner | None = None
        """Of the training documents, once B is known."""
        self.validation_planner: Planner | None = None
        if data.finds_budget:
            self.plan_config = run.plan_config(data_parallel_size=self.data_parallel_size, max_tokens_per_microbatch=INT32_MAX // 2)
        else:
            self.settle(run)

    def settle(self, run: RunConfig) -> None:
        """Make the planners: B is known.

        Args:
            run: settings, the budget among them.
        Raises:
            ConfigError, PlanError: these documents cannot be planned with it.
        """
        self.budget = run.data.max_tokens_per_microbatch
        cost = run.cost_model(self.vocab_size)
        self.plan_config = run.plan_config(data_parallel_size=self.data_parallel_size, cost=cost)
        changes = dict(document_order="sequential", drop_last=False)
        if self.plan_config.microbatching == "concat-chunk":
            changes["microbatching"] = "dynamic"  # held-out losses of all ways are per document
        self._validation_plan_config = run.plan_config(data_parallel_size=self.data_parallel_size, cost=cost, **changes)
        self._make_planners(run)

    def adopt_fingerprints(self, run: RunConfig, *, training: str, validation: str) -> None:
        """Take over what a rank that reads tokens found, so that this rank's plans have the same digests. The lengths are known to be equal."""
        self.splits.train.fingerprint = training
        if self.splits.valid is not None:
            self.splits.valid.fingerprint = validation
        if self.planner is not None:
            self._make_planners(run)

    def _make_planners(self, run: RunConfig) -> None:
        self.planner = _planner_of(self.splits.train, self.plan_config, "")
        self.validation_planner = None
        if run.training.eval_iters and self.splits.valid is not None:
            refusal = f"the validation documents (--split {run.data.split}) cannot be planned: "
            self.validation_planner = _planner_of(self.splits.valid, self._validation_plan_config, refusal)
        try:
            for planner in filter(None, (self.planner, self.validation_planner)):
                check_positions(run.model, planner.longest_piece, joined=planner.config.microbatching == "concat-chunk")
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _planner_of(corpus: Corpus, config: PlanConfig, refusal: str) -> Planner:
    """The planner of a corpus.

    Raises:
        PlanError: `refusal`, then why, in words of flags.
    """
    try:
        return Planner(corpus.lengths, config, fingerprint=corpus.fingerprint)
    except PlanError as error:
        raise PlanError(refusal + in_flags(str(error))) from error


def layers_for(run: RunConfig) -> str:
    """Layers of this machine: Megatron-Core's own with our attention on a CPU, Transformer Engine's on GPUs."""
    if not device.has_gpu():
        if run.fp8.fp8:
            raise ConfigError("--fp8 needs Transformer Engine on a GPU, and there is none here: leave it out")
        return "local"
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "the layers for GPUs are Transformer Engine's, which is not installed: pip install 'megatron-dyn[te]' "
            "(or hide the GPUs with CUDA_VISIBLE_DEVICES='' to train on the CPU)"
        )
    if run.precision == "fp32":
        raise ConfigError("Transformer Engine has no attention for packed sequences in fp32: give --bf16")
    parallel = run.parallel
    if process_group_backend(run) == "gloo" and (parallel.pipeline_model_parallel_size > 1 or parallel.overlap_grad_reduce):
        raise ConfigError(
            "gloo on GPUs (several ranks sharing a card) has no point-to-point and no overlapped communication of GPU tensors: "
            "leave out --pipeline-model-parallel-size and the overlaps, or use nccl with a card for each rank"
        )
    if run.overlap.tp_comm_overlap:
        try:
            choose_backend("te")
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"--tp-comm-overlap: {error}") from error
    return "te"


def prepare_device(run: RunConfig) -> tuple[str, str]:
    """Make this process's device ready for Megatron-Core, for programs that build a run's model without its documents.

    Returns:
        The backend of the process groups, and which layers the model is built of.

    Raises:
        ConfigError, ValueError: this machine cannot run it.
    """
    backend = process_group_backend(run)
    device.initialize_device(backend=backend)
    layers = layers_for(run)
    device.replace_what_is_missing(backend)
    return backend, layers


def process_group_backend(run: RunConfig) -> str:
    wanted = run.parallel.distributed_backend
    return device.distributed_backend(None if wanted == "auto" else wanted)
