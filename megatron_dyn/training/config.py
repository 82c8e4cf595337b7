# SPDX-License-Identifier: Apache-2.0
"""Everything a run is told, as nested keyword-only dataclasses that are validated once.

Each field carries its explanation in the string below it; `arguments.py` turns field and explanation into a flag with
the same name (`max_tokens_per_microbatch` -> `--max-tokens-per-microbatch`), and YAML uses the same keys. Names are
Megatron-LM's wherever it has one. Every check here is a pure function of the settings and of the world size, so all
ranks refuse a bad run with the same words before any process group exists.
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron_dyn.pipeline.schedule import check_schedule


AUTO = "auto"
"""In the place of a budget: to be found."""
MOST_MEMORY_GIB = 1e6


class ConfigError(ValueError):
    """A run's settings are wrong or contradict each other; nothing has been started."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(kw_only=True)
class ParallelConfig:
    """How one model and one step are divided over the ranks."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (TP)."""

    sequence_parallel: bool = False
    """Divide the activations between the matrices over the TP ranks too (SP). T is then a multiple of TP."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages (PP)."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks on each pipeline rank: the interleaved schedule (VPP). Microbatches per rank become a multiple of PP."""

    overlap_p2p_communication: bool = True
    """Interleaved schedule: messages between stages travel while the next chunk computes; without, one batch of them between two chunks."""

    overlap_p2p_communication_warmup_flush: bool = False
    """Overlap them also while the pipeline fills and empties."""

    use_distributed_optimizer: bool = False
    """Divide the optimizer's state over the data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather the distributed optimizer's parameters while the forward pass runs."""

    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of the process groups: nccl on GPUs and gloo on CPU, unless said (gloo lets several ranks share one GPU)."""

    distributed_timeout_minutes: int = 10
    """Minutes that a collective may wait for its peers before the run is given up."""

    stall_timeout: float | None = None
    """Seconds without progress on any rank until each shows its stack and the job ends (0: never; none: 9/10 of the collectives' time-out)."""

    heartbeat_timeout: float = 30.0
    """Seconds without a sign of life of a rank (killed, frozen, its node gone) after which the job ends (0: never)."""

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_timeout_minutes"):
            require(getattr(self, name) >= 1, f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")
        minutes = self.distributed_timeout_minutes
        require(minutes <= 525_600, f"--distributed-timeout-minutes is {minutes}: more than a year, which no store takes")
        require(
            self.stall_timeout is None or self.stall_timeout == 0 or self.stall_timeout >= 2,
            f"--stall-timeout is {self.stall_timeout}: it must be 0 (never) or at least 2, or a slow step would end healthy runs",
        )
        require(
            self.heartbeat_timeout == 0 or self.heartbeat_timeout >= 2,
            f"--heartbeat-timeout is {self.heartbeat_timeout}: it must be 0 (never) or at least 2, or a busy machine would end healthy runs",
        )
        if self.num_virtual_stages_per_pipeline_rank == 1:
            self.num_virtual_stages_per_pipeline_rank = None
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False  # as Megatron-LM: nothing to divide
        require(
            not self.overlap_param_gather or (self.use_distributed_optimizer and self.overlap_grad_reduce),
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce: "
            "without them no parameter is gathered at all",
        )
        try:
            check_schedule(
                self.pipeline_model_parallel_size,
                self.num_virtual_stages_per_pipeline_rank,
                overlap=self.overlap_p2p_communication,
                warmup_flush=self.overlap_p2p_communication_warmup_flush,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def stall_timeout_secs(self) -> float:
        """Longest time without progress: shorter than a collective's time-out, so that the stacks are seen before it strikes; 0: no limit.

        Starting, the first step and saving get `progress.PATIENCE` times as long.
        """
        return 54.0 * self.distributed_timeout_minutes if self.stall_timeout is None else self.stall_timeout

    @property
    def data_timeout_secs(self) -> float:
        """Longest wait for a step's data: shorter than a collective's, so that its reason is told before the peers give up."""
        return 48.0 * self.distributed_timeout_minutes

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks per pipeline rank under Megatron-Core's name; None without interleaving."""
        return self.num_virtual_stages_per_pipeline_rank

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` ranks.

        Raises:
            ConfigError: The ranks cannot be divided into whole copies.
        """
        require(
            world_size % self.model_parallel_size == 0,
            f"a world of {world_size} cannot hold whole copies of a model that takes TP {self.tensor_model_parallel_size} x PP "
            f"{self.pipeline_model_parallel_size} = {self.model_parallel_size} ranks: start a multiple of "
            f"{self.model_parallel_size} processes (torchrun --nproc-per-node), or change the parallel sizes",
        )
        return world_size // self.model_parallel_size


@dataclass(kw_only=True)
class DataConfig:
    """Which documents are read, and how a step is made of them."""

    data_path: list[str] = field(default_factory=list)
    """Needed. Prefix of a .bin/.idx pair, or several with weights: `0.7 A 0.3 B` (weights are shares of the tokens)."""

    split: str = "98,2"
    """Shares of the documents for training and validation, by document index (`98,2`; a third part is left unused)."""

    tokenizer_model: str | None = None
    """Sentencepiece model the corpus was made with: gives the vocabulary and the special ids."""

    vocab_size: int | None = None
    """Vocabulary size when no --tokenizer-model is given (before padding for tensor parallelism)."""

    max_tokens_per_microbatch: int | Literal["auto"] | None = None
    """Needed. Token budget B: no packed microbatch holds more tokens. auto: the largest that fits the device, measured before the run starts."""

    device_memory_gib: float | None = None
    """Memory of one device that the run may take (none: all there is). Without a GPU --max-tokens-per-microbatch auto needs it."""

    global_batch_size: int | None = None
    """Documents in one optimizer step. Give this or --global-batch-tokens."""

    global_batch_tokens: int | None = None
    """Documents are taken into a step until they hold this many tokens. Give this or --global-batch-size."""

    max_documents_per_microbatch: int | None = None
    """Most pieces packed into one microbatch (none: as many as fit)."""

    max_sum_squares_per_microbatch: int | None = None
    """Most of the sum of squared piece lengths in one microbatch (none: no such cap); a document longer than its root is oversize."""

    oversize: Literal["split", "truncate", "drop", "error"] = "split"
    """What happens to a document longer than the budget; every use is counted."""

    drop_last: bool = False
    """Drop the short step at the end of an epoch (counted) instead of training on it."""

    token_bucket: int = 1
    """Round T up to multiples of this: at most capacity / bucket different shapes, at the price of more padding."""

    cost_file: str | None = None
    """Measured cost of tokens and attention to balance by (python -m megatron_dyn calibrate; none: the model's operations)."""

    microbatching: Literal["dynamic", "packed-fixed", "fixed-count", "pad-to-max", "concat-chunk"] = "dynamic"
    """How a step's documents become microbatches of at most B tokens; the others are for comparison. packed-fixed: as planned, padded to B;
    fixed-count: --documents-per-microbatch documents in order, padded to their longest; pad-to-max: each padded to the corpus's longest, at most B;
    concat-chunk: joined and cut every B tokens, attention across them (other data)."""

    documents_per_microbatch: int = 1
    """Documents in a microbatch of --microbatching fixed-count; fewer where they would not fit into B when padded."""

    document_order: Literal["shuffle", "sequential", "length-window"] = "shuffle"
    """Order of the training documents within an epoch: seeded shuffle, as stored, or shuffled with documents of similar length together."""

    length_window: int = 16384
    """Documents that --document-order length-window sorts by length together before it cuts them into steps."""

    prefetch_steps: int = 2
    """Steps whose plan and tensors are made ahead in the background."""

    data_broadcast: bool = False
    """Only the first rank of each tensor-parallel group reads tokens and gives them to the others, which need the .idx files only."""

    check_batch_content: bool = False
    """Compare checksums of the tokens that the ranks of one model copy read, each step before it runs."""

    def __post_init__(self) -> None:
        require(bool(self.data_path), "no --data-path: give the prefix of a .bin/.idx pair (python -m megatron_dyn preprocess writes one)")
        require(
            self.max_tokens_per_microbatch is not None,
            "no --max-tokens-per-microbatch: it is the token budget B of a packed microbatch (what fits into memory, e.g. 8192; auto finds it)",
        )
        require(
            self.device_memory_gib is None or 0 < self.device_memory_gib <= MOST_MEMORY_GIB,
            f"--device-memory-gib is {self.device_memory_gib}: the memory of one device, such as 80 (at most {MOST_MEMORY_GIB:,.0f})",
        )
        require(
            (self.global_batch_size is None) != (self.global_batch_tokens is None),
            "exactly one of --global-batch-size (documents a step) and --global-batch-tokens is needed, "
            f"not {'both' if self.global_batch_size is not None else 'neither'}",
        )
        require(
            self.tokenizer_model is not None or self.vocab_size is not None,
            "neither --tokenizer-model nor --vocab-size: the embedding's size would be a guess",
        )
        require(self.vocab_size is None or self.vocab_size >= 1, f"--vocab-size is {self.vocab_size}: it must be at least 1")
        require(
            self.documents_per_microbatch == 1 or self.microbatching == "fixed-count",
            f"--documents-per-microbatch {self.documents_per_microbatch} with --microbatching {self.microbatching}: it would change nothing; "
            "give --microbatching fixed-count, or leave it out",
        )
        require(
            self.length_window == DataConfig.length_window or self.document_order == "length-window",
            f"--length-window {self.length_window} with --document-order {self.document_order}: it would change nothing; "
            "give --document-order length-window, or leave it out",
        )
        require(self.token_bucket >= 1, f"--token-bucket is {self.token_bucket}: it must be at least 1")
        require(self.prefetch_steps >= 0, f"--prefetch-steps is {self.prefetch_steps}: it must be at least 0")

    @property
    def finds_budget(self) -> bool:
        """Whether the budget is still to be found."""
        return self.max_tokens_per_microbatch == AUTO


@dataclass(kw_only=True)
class OptimizerSettings:
    """The update: Megatron-Core's optimizer, its learning rate and its weight decay."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Update rule (adam is AdamW)."""

    lr: float | None = None
    """Needed. Highest learning rate."""

    min_lr: float = 0.0
    """Learning rate that the decay ends in."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""

    lr_decay_iters: int | None = None
    """Steps that the decay takes (default: --train-iters)."""

    lr_warmup_iters: int = 0
    """Steps of linear warmup."""

    lr_warmup_fraction: float | None = None
    """Warmup as a fraction of --lr-decay-iters, instead of --lr-warmup-iters."""

    lr_warmup_init: float = 0.0
    """Learning rate that the warmup starts at."""

    lr_wsd_decay_iters: int | None = None
    """Steps of the final annealing of the WSD schedule."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the WSD annealing."""

    weight_decay: float = 0.01
    """Weight decay of matrices (norm weights and biases have none)."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""

    adam_eps: float = 1e-8
    """Term that keeps Adam's division finite."""

    sgd_momentum: float = 0.9
    """Momentum of sgd."""

    clip_grad: float = 1.0
    """Largest norm of the whole gradient (0: no clipping)."""

    def __post_init__(self) -> None:
        require(self.lr is not None, "no --lr: the highest learning rate is needed")
        require(self.lr > 0.0, f"--lr is {self.lr}: it must be above 0")
        require(0.0 <= self.min_lr <= self.lr, f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}")
        require(0.0 <= self.lr_warmup_init <= self.lr, f"--lr-warmup-init {self.lr_warmup_init} must lie between 0 and --lr {self.lr}")
        require(
            not (self.lr_warmup_iters and self.lr_warmup_fraction is not None),
            "--lr-warmup-iters and --lr-warmup-fraction contradict each other: give one",
        )
        require(
            (self.lr_decay_style == "WSD") == (self.lr_wsd_decay_iters is not None),
            "--lr-wsd-decay-iters belongs to --lr-decay-style WSD, and WSD needs it",
        )
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            require(0.0 <= getattr(self, name) < 1.0, f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 0 and below 1")
        require(self.adam_eps > 0.0, f"--adam-eps is {self.adam_eps}: it must be above 0")
        require(
            self.lr_warmup_fraction is None or 0.0 <= self.lr_warmup_fraction < 1.0,
            f"--lr-warmup-fraction is {self.lr_warmup_fraction}: a share of the decay's steps, at least 0 and below 1",
        )
        for name in ("lr_decay_iters", "lr_wsd_decay_iters"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')} is {value}: it must be at least 1")
        for name in ("weight_decay", "clip_grad", "lr_warmup_iters"):
            require(getattr(self, name) >= 0, f"--{name.replace('_', '-')} is {getattr(self, name)}: it must not be negative")


@dataclass(kw_only=True)
class TrainingConfig:
    """How long the run goes on, and what it does on the way."""

    train_iters: int | None = None
    """Needed. Optimizer steps of the whole run (a resumed run goes on up to this number)."""

    seed: int = 1234
    """Seed of the initial weights, of dropout and of the order of the documents."""

    bf16: bool = False
    """Compute in bfloat16 with fp32 master weights and fp32 gradients (default: all in fp32)."""

    gradient_accumulation_fusion: bool = True
    """Add weight gradients to their fp32 buffer inside the matrix product (Transformer Engine's layers; the output layer with Apex only)."""

    eval_interval: int | None = 1000
    """Steps between evaluations on the validation documents; one more comes at the end."""

    eval_iters: int = 100
    """Steps of one evaluation; 0 evaluates nothing. Never more than one pass over the validation documents."""

    on_nan: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite loss or gradient: stop and name microbatch and documents, or leave the step out and go on."""

    exit_interval: int | None = None
    """Save and exit 0 after an iteration that this number divides."""

    def __post_init__(self) -> None:
        require(self.train_iters is not None, "no --train-iters: the number of optimizer steps is needed")
        require(self.train_iters >= 1, f"--train-iters is {self.train_iters}: it must be at least 1")
        require(self.eval_interval is None or self.eval_interval >= 1, f"--eval-interval is {self.eval_interval}: it must be at least 1")
        require(self.eval_iters >= 0, f"--eval-iters is {self.eval_iters}: it must be at least 0")
        require(self.exit_interval is None or self.exit_interval >= 1, f"--exit-interval is {self.exit_interval}: it must be at least 1")
        require(self.seed >= 0, f"--seed is {self.seed}: it must not be negative")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where the run's state goes and comes from."""

    save: str | None = None
    """Folder that checkpoints are saved in."""

    load: str | None = None
    """Folder whose latest checkpoint the run continues from (a fresh start when it holds none)."""

    save_interval: int | None = None
    """Steps between checkpoints; one more is saved at the end and on SIGTERM."""

    override_data_mismatch: bool = False
    """Continue although documents, seed or their order are others than the checkpoint's; goes on from the saved step, and is recorded."""

    keep_last: int | None = None
    """Complete checkpoints to keep; older ones are removed after a newer one is complete (none: keep all)."""

    def __post_init__(self) -> None:
        require(self.save_interval is None or self.save is not None, "--save-interval without --save: nothing would be saved")
        require(self.save_interval is None or self.save_interval >= 1, f"--save-interval is {self.save_interval}: it must be at least 1")
        require(
            not self.override_data_mismatch or self.load is not None, "--override-data-mismatch without --load: there is nothing to override"
        )
        require(self.keep_last is None or self.keep_last >= 1, f"--keep-last is {self.keep_last}: it must be at least 1")


@dataclass(kw_only=True)
class LoggingConfig:
    """What the run shows."""

    run_dir: str | None = None
    """Folder for metrics.jsonl, summary.json, plots and TensorBoard events (none: console only)."""

    log_interval: int = 1
    """Steps between lines on the console (metrics.jsonl has every step)."""

    measure_pipeline_bubble: bool = False
    """Also measure how long each stage waited for its neighbours in each step (`pipeline-bubble-measured`)."""

    tensorboard: bool = True
    """Write TensorBoard events into the run's folder."""

    def __post_init__(self) -> None:
        require(self.log_interval >= 1, f"--log-interval is {self.log_interval}: it must be at least 1")
