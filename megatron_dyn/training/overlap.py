# SPDX-License-Identifier: Apache-2.0
"""Settings of FP8 and of communication/GEMM overlap under tensor parallelism, and the buffers that follow from them.

capacity    [B rounded up to T's alignment, hidden]    whatever ``seq_length`` and ``micro_batch_size`` would have said
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from megatron_dyn import userbuffers
from megatron_dyn.planning.alignment import FP8_ROWS
from megatron_dyn.training.config import require

if TYPE_CHECKING:
    from megatron_dyn.training.run_config import RunConfig


@dataclass(kw_only=True)
class Fp8Config:
    """FP8 matrix products (Transformer Engine, GPUs from Hopper on)."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Linear layers of the blocks in FP8: e4m3 everywhere, or hybrid with e5m2 for the gradients (needs --bf16)."""

    fp8_recipe: Literal["delayed", "tensorwise"] = "delayed"
    """Where scales come from: the amax of past steps, or (tensorwise) of the tensor itself."""

    fp8_margin: int = 0
    """Powers of two of headroom in a delayed scale."""

    fp8_amax_history_len: int = 1
    """Steps whose amax a delayed scale looks at."""

    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Which amax of that history counts."""

    def __post_init__(self) -> None:
        require(self.fp8_amax_history_len >= 1, f"--fp8-amax-history-len is {self.fp8_amax_history_len}: it must be at least 1")
        require(self.fp8_margin >= 0, f"--fp8-margin is {self.fp8_margin}: it must not be negative")


@dataclass(kw_only=True)
class OverlapConfig:
    """Communication of tensor parallelism beside its matrix products (UserBuffers)."""

    tp_comm_overlap: bool = False
    """Overlap all-gathers and reduce-scatters of the blocks' linear layers with their matrix products (needs --sequence-parallel)."""

    tp_comm_overlap_cfg: str | None = None
    """YAML table of the communicators' methods and options, as Megatron-LM's (`qkv_fprop: {method: ring_exchange, ...}`)."""

    tp_comm_overlap_ag: bool = True
    """Overlap the all-gather with the matrix product that needs it (Megatron-LM's spelling: --disable-tp-comm-overlap-ag)."""

    tp_comm_overlap_rs: bool = True
    """Overlap the reduce-scatter with the matrix product that makes its input (--disable-tp-comm-overlap-rs)."""

    tp_comm_overlap_rs_dgrad: bool = False
    """Overlap the reduce-scatter of the input gradient with its own matrix product instead of the weight gradient's."""

    tp_comm_bulk_dgrad: bool = True
    """Gather a column layer's input beside the product of its input gradient (--disable-tp-comm-bulk-dgrad)."""

    tp_comm_bulk_wgrad: bool = True
    """Reduce-scatter a column layer's input gradient beside the product of its weight gradient (--disable-tp-comm-bulk-wgrad)."""

    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] | None = None
    """How ranks exchange handles while buffers are registered (none: as the process groups)."""

    ub_layout_fence: Literal["auto", "always", "never"] = "auto"
    """Order the ranks where a buffer changes its layout: auto, only where no other exchange does; see docs/userbuffers.md."""

    def __post_init__(self) -> None:
        changed = [flag for name, flag in _NEED_OVERLAP.items() if getattr(self, name) != OverlapConfig.__dataclass_fields__[name].default]
        require(self.tp_comm_overlap or not changed, f"{', '.join(changed)} without --tp-comm-overlap: nothing would overlap; give it too")
        try:
            self.table = userbuffers.read_overlap_config(self.tp_comm_overlap_cfg) if self.tp_comm_overlap_cfg else {}
        except (userbuffers.OverlapConfigError, OSError) as error:
            require(False, f"--tp-comm-overlap-cfg: {error}")
        for name in userbuffers.DGRADS_OF_COLUMNS:
            method = self.table.get(name, {}).get("method", "bulk")
            if self.tp_comm_overlap_rs_dgrad:
                # Without a table Megatron-LM would hand an all-gather to a layer that reduce-scatters.
                require(
                    name not in self.table or method != "bulk",
                    f"--tp-comm-overlap-rs-dgrad reduce-scatters beside {name}, but the table makes it 'bulk': use ring_exchange or pipeline",
                )
                self.table.setdefault(name, {"method": "ring_exchange"})
            else:
                require(
                    method == "bulk",
                    f"the table makes {name} {method!r}, a reduce-scatter beside its own product: give --tp-comm-overlap-rs-dgrad too",
                )


_NEED_OVERLAP = {
    "tp_comm_overlap_cfg": "--tp-comm-overlap-cfg",
    "tp_comm_overlap_ag": "--disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "--disable-tp-comm-overlap-rs",
    "tp_comm_overlap_rs_dgrad": "--tp-comm-overlap-rs-dgrad",
    "tp_comm_bulk_dgrad": "--disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "--disable-tp-comm-bulk-wgrad",
    "tp_comm_bootstrap_backend": "--tp-comm-bootstrap-backend",
    "ub_layout_fence": "--ub-layout-fence",
}


def check_overlap(run: "RunConfig") -> None:
    """Refuse FP8 and overlap settings that contradict the others.

    Raises:
        ConfigError: see the messages.
    """
    parallel, overlap, hidden = run.parallel, run.overlap, run.model.hidden_size
    require(run.fp8.fp8 is None or run.training.bf16, "--fp8 needs --bf16: what is not a matrix product is computed in bf16")
    if not overlap.tp_comm_overlap:
        return
    tp = parallel.tensor_model_parallel_size
    require(
        parallel.sequence_parallel and tp > 1,
        f"--tp-comm-overlap with TP {tp}{'' if parallel.sequence_parallel or tp == 1 else ' and without --sequence-parallel'}: the exchanges it overlaps "
        "are those of sequence parallelism over at least two tensor-parallel ranks; give both, or leave it out",
    )
    try:
        userbuffers.communicator_specs(overlap.table, tp, hidden=hidden)
    except userbuffers.OverlapConfigError as error:
        require(False, f"{'--tp-comm-overlap-cfg' if overlap.tp_comm_overlap_cfg else '--tp-comm-overlap'}: {error}")


def overlap_settings(run_overlap: OverlapConfig) -> dict[str, bool]:
    """The fields of Megatron's `ModelParallelConfig` that tell its layers what to overlap."""
    names = (
        "tp_comm_overlap", "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad"
    )  # fmt: skip
    return {name: getattr(run_overlap, name) for name in names}


def fp8_settings(fp8: Fp8Config) -> dict[str, object]:
    """The fields of Megatron's `TransformerConfig` for FP8; none of them when there is none."""
    if fp8.fp8 is None:
        return {}
    names = ("fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
    return {name: getattr(fp8, name) for name in names}


def prepare_overlap(run: "RunConfig", layers: Literal["local", "te"]) -> str:
    """What can fail on one rank alone, such as compiling the extension: before the buffers are registered, in which all ranks wait for all.

    Returns:
        What has to be the same on every rank.
    Raises:
        NativeBuildError: see `native.load`.
    """
    if not run.overlap.tp_comm_overlap or layers != "te":
        return ""
    from megatron_dyn.userbuffers import native

    return native.load().te_version()


def initialize_overlap(run: "RunConfig", *, capacity: int, layers: Literal["local", "te"], process_group_backend: str) -> str | None:
    """Register the buffers that the run's layers exchange through: before the model is built, on every rank.

    Args:
        run: settings.
        capacity: rows of the largest microbatch: the token budget rounded up to T's alignment.
        layers: Transformer Engine's layers exchange through its UserBuffers, local ones through torch.distributed.
        process_group_backend: of the process groups.
    Returns:
        What there is now, for the log; None without overlap.
    """
    overlap = run.overlap
    if not overlap.tp_comm_overlap:
        return None
    dtype = torch.bfloat16 if run.training.bf16 else torch.float32
    manager = userbuffers.initialize_ub(
        [capacity, run.model.hidden_size],
        run.parallel.tensor_model_parallel_size,
        quantization_modes=["fp8" if run.fp8.fp8 else "none"],
        dtype=dtype,
        ub_cfgs=overlap.table,
        bootstrap_backend=overlap.tp_comm_bootstrap_backend or process_group_backend,
        backend="te" if layers == "te" else "reference",
        layout_fence=overlap.ub_layout_fence,
        fp8_local_rows=FP8_ROWS,
    )
    return manager.description()
