# SPDX-License-Identifier: Apache-2.0
"""Save and load a training run: model, optimizer, scheduler, generators, sampler.

On the same topology a resumed run continues bit for bit. Under another tensor, pipeline (also virtual) or data parallelism, or with
the distributed optimizer switched on or off, the same values are loaded and only the generators are seeded anew.
What lies on disk and why a kill leaves nothing half-done: `checkpoint_files`.
"""

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megatron_dyn.training.checkpoint_disk import digest_files
from megatron_dyn.training.checkpoint_files import CheckpointError, CheckpointFolder, on_every_rank
from megatron_dyn.training.checkpoint_optimizer import OptimizerPart
from megatron_dyn.training.checkpoint_run import (
    RNG_KEY,
    describe,
    rng_object,
    rng_state,
    seed_anew,
    set_rng_state,
    topology,
    versions,
)
from megatron_dyn.training.checkpoint_safety import require_data_only, weights_only_loading
from megatron_dyn.training.checkpoint_tensors import misfits, read_state, requested_tensors, saved_tensors, write_state

__all__ = ["CheckpointError", "CheckpointManager", "LoadedState"]

RUN = "run"
"""In `extra`: the settings of the run that saved."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """What a loaded checkpoint says beyond the tensors, which are in the model and optimizer now."""

    iteration: int
    """Steps done when it was saved."""
    sampler_state: dict
    """As given to `save`."""
    extra: dict
    """As given to `save`."""
    rng_restored: bool
    """False: another topology, so the generators were seeded anew."""
    path: Path
    """The checkpoint's folder."""


class CheckpointManager:
    """Writes checkpoints into one folder and reads them from one. Every method is collective over all ranks.

    Args:
        save: folder to write into; the same shared folder on all ranks.
        load: folder to read from; may be the same.
        keep_last: how many complete checkpoints stay (None: all). Older ones go after the new one is complete.
        vocab_size: real vocabulary. Megatron pads it to a multiple of a number times TP; with this, a checkpoint of another padding
            is loaded (padding rows are dropped, or zero). None: the padded vocabulary must be the same.
    """

    def __init__(
        self,
        *,
        save: "str | os.PathLike | None",
        load: "str | os.PathLike | None",
        keep_last: Optional[int],
        vocab_size: Optional[int] = None,
    ):
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: at least the checkpoint just written must stay (or None: keep all)")
        self._save_to = CheckpointFolder(save) if save is not None else None
        self._load_from = CheckpointFolder(load) if load is not None else None
        self._keep_last = keep_last
        self._vocab_size = vocab_size

    def latest(self) -> Optional[int]:
        """The iteration that `load` would load; None when there is no checkpoint (or no folder to load from)."""
        folder = self._load_from
        if folder is None:
            return None
        return on_every_rank("find the latest checkpoint", lambda: folder.latest() if dist.get_rank() == 0 else None)[0]

    def recorded_run(self) -> Optional[dict]:
        """The settings of the run that saved what `load` would load; None when there is nothing to load."""
        iteration = self.latest()
        if iteration is None:
            return None
        return on_every_rank(f"read iteration {iteration}", lambda: self._load_from.read_seal(iteration))[0]["extra"][RUN]

    # ---- saving --------------------------------------------------------------------------------------------

    def save(self, iteration: int, *, models: list, optimizer: Any, scheduler: Any, sampler_state: dict, extra: dict) -> Path:
        """Write a checkpoint; returns its folder after it is complete and durable.

        Args:
            iteration: steps done.
            models: GPTModel chunks of this rank, possibly wrapped in DDP; their parameters must be up to date (with
                `overlap_param_gather`: gathered).
            optimizer: MegatronOptimizer, or None.
            scheduler: OptimizerParamScheduler, or None.
            sampler_state: JSON-able, the same on all ranks.
            extra: JSON-able, the same on all ranks but for `RUN`, of which rank 0's is kept: nodes may have their files in different places.

        Raises:
            CheckpointError: on every rank, within the time of the write, if any rank failed. The checkpoints that were
                there before are untouched.
        """
        if self._save_to is None:
            raise CheckpointError("no folder to save checkpoints in was given (--save)")
        folder, rank = self._save_to, dist.get_rank()
        part = OptimizerPart(optimizer, _metadata()) if optimizer is not None else None
        description = {
            "iteration": iteration,
            "versions": versions(),
            "topology": topology(),
            "optimizer": {"kind": part.kind} if part else None,
            "scheduler": scheduler is not None,
            "sampler_state": sampler_state,
            "extra": extra,
        }
        _require_equal_on_all_ranks(description)
        begun = on_every_rank(f"begin a checkpoint in {folder.root}", lambda: folder.begin(iteration) if rank == 0 else None)
        staging = begun[0]
        try:
            on_every_rank("find the folder to save in", lambda: _require_shared(staging))
            model_state = _model_state(models)
            state = {**model_state, "iteration": iteration, "checkpoint_version": 3.0, "content_metadata": _metadata()}
            if part:
                state["optimizer"] = part.state(model_state)
                state["optimizer_groups"] = part.groups()
            if scheduler is not None:
                state["opt_param_scheduler"] = scheduler.state_dict()
            state[RNG_KEY] = rng_object(rng_state())
            write_state(state, staging, _metadata()["dp_cp_group"])

            def digest_own() -> dict:
                names = [path.name for path in staging.iterdir()]
                own = [n for n in names if n.startswith(f"__{rank}_") or (rank == 0 and not n.startswith("__"))]
                return digest_files(staging, own)

            files = {}
            for of_rank in on_every_rank(f"read back the files in {staging}", digest_own):
                files.update(of_rank)

            def complete() -> Optional[Path]:
                if rank != 0:
                    return None
                folder.seal(staging, description, files)
                return folder.publish(staging, iteration)

            path = on_every_rank(f"complete the checkpoint of iteration {iteration}", complete)[0]
        except BaseException:
            if rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        if rank == 0:
            self._prune(iteration)
        return path

    def _prune(self, iteration: int) -> None:
        try:
            gone = self._save_to.prune(iteration, self._keep_last)
        except OSError as error:  # the new checkpoint is safe: no reason to end the run
            logger.warning("could not remove old checkpoints in %s: %s", self._save_to.root, error)
        else:
            if gone:
                logger.info("removed the checkpoints of iterations %s", ", ".join(map(str, gone)))

    # ---- loading -------------------------------------------------------------------------------------------

    @weights_only_loading()
    def load(self, *, models: list, optimizer: Any, scheduler: Any, sampler: Any = None) -> Optional[LoadedState]:
        """Load the latest checkpoint into the given objects.

        The generators are restored on the same topology; under another they are seeded anew, and the log says so.

        Args:
            models: as for `save`, under any parallelism.
            optimizer: None: load the model only.
            scheduler: None: its state is not loaded. If it says `override_opt_param_scheduler`, this run's settings (learning rates,
                betas, weight decay) stay and only the step count is taken.
            sampler: gets `load_state_dict(sampler_state)` if given.

        Returns:
            None when there is no folder to load from or it holds no checkpoint.

        Raises:
            CheckpointError: on every rank, before model, optimizer or scheduler are changed: the checkpoint is damaged, of another
                version, or does not fit the model.
        """
        iteration = self.latest()
        if iteration is None:
            return None
        folder, rank = self._load_from, dist.get_rank()
        seal = on_every_rank(f"load iteration {iteration}", lambda: folder.read_seal(iteration))[0]
        names = sorted(seal["files"])[rank :: dist.get_world_size()]
        on_every_rank(f"load iteration {iteration}", lambda: folder.check_files(iteration, seal["files"], names))
        path = folder.path(iteration)

        def require_own() -> None:
            with folder.offering_an_older(iteration):
                require_data_only(path)

        on_every_rank(f"load iteration {iteration}", require_own)
        restores_rng = _can_restore_rng(seal)
        model_state = _model_state(models)
        saved = saved_tensors(path)
        self._require_fit(path, requested_tensors(model_state), saved, covers="model")
        part, wanted, groups = None, {}, []
        if optimizer is not None:
            part = OptimizerPart(optimizer, _metadata())
            keep_settings = scheduler is not None and scheduler.override_opt_param_scheduler

            def ask() -> None:  # what it finds stays on its rank
                wanted.update(_request_optimizer(part, model_state, seal, path))
                saved_groups = dist_checkpointing.load_common_state_dict(str(path))["optimizer_groups"]["groups"]
                groups.extend(part.matched_groups(saved_groups, keep_settings=keep_settings))

            on_every_rank(f"load iteration {iteration}", ask)
            self._require_fit(path, requested_tensors(wanted), saved, covers="optimizer")
        if sampler is not None:
            on_every_rank("restore the sampler", lambda: sampler.load_state_dict(seal["sampler_state"]))
        request = {**model_state, "optimizer_tensors": wanted}
        if restores_rng:
            request["generators"] = rng_object(None)
        with folder.offering_an_older(iteration):
            loaded = read_state(request, path)
        _load_models(models, loaded)
        if part is not None:
            part.restore(loaded["optimizer_tensors"], groups, loaded["optimizer_groups"]["step"])
        if scheduler is not None and "opt_param_scheduler" in loaded:
            scheduler.num_steps = 0  # loading adds the saved steps
            scheduler.load_state_dict(loaded["opt_param_scheduler"])
        if restores_rng:
            set_rng_state(loaded["generators"])
        else:
            seed_anew(iteration)
        return LoadedState(
            iteration=iteration, sampler_state=seal["sampler_state"], extra=seal["extra"], rng_restored=restores_rng, path=path
        )

    def _require_fit(self, path: Path, wanted: dict, saved: dict, covers: str) -> None:
        keys = set().union(*on_every_rank("compare the model with the checkpoint", lambda: set(wanted)))
        lines = misfits(wanted, saved, self._vocab_size)
        if covers == "model":
            left = sorted(key for key in saved if key not in keys and not key.startswith("optimizer."))
            lines += [f"{key} {saved[key]} is in the checkpoint only" for key in left]

        def refuse() -> None:
            if lines:
                more = f" (and {len(lines) - 8} more)" if len(lines) > 8 else ""
                raise CheckpointError(f"the {covers} does not fit {path}: " + "; ".join(lines[:8]) + more)

        on_every_rank("load the checkpoint", refuse)


def _metadata() -> dict:
    """Megatron's switches for the layout of the state (names as in Megatron-LM)."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _can_restore_rng(seal: dict) -> bool:
    if seal["topology"] == topology():
        return True
    if dist.get_rank() == 0:
        text = f"saved with {describe(seal['topology'])}, loaded with {describe(topology())}"
        logger.warning("the random number generators are seeded anew (dropout will differ): %s", text)
    return False


def _request_optimizer(part: OptimizerPart, model_state: dict, seal: dict, path: Path) -> dict:
    if seal["optimizer"] is None:
        raise CheckpointError(f"{path} was saved without an optimizer; load the model only, or another checkpoint")
    return part.request(model_state, seal["optimizer"])


def _load_models(models: list, loaded: dict) -> None:
    for name, module in zip(_chunk_names(models), models):
        _unwrapped(module).load_state_dict(loaded[name])


def _model_state(models: list) -> dict:
    metadata = _metadata()
    return {
        name: _unwrapped(module).sharded_state_dict(metadata=metadata) for name, module in zip(_chunk_names(models), models)
    }


def _chunk_names(models: list) -> "list[str]":
    return ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while hasattr(module, "module"):  # DDP, Float16Module
        module = module.module
    return module


def _require_shared(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(f"{staging}, made by rank 0, is not there: --save must be one folder that all ranks share")


def _require_equal_on_all_ranks(description: dict) -> None:
    """What is saved once must be the same everywhere, or a resumed rank would get another rank's state."""
    description = description | {"extra": {name: value for name, value in (description["extra"] or {}).items() if name != RUN}}
    digests = on_every_rank(
        "describe the checkpoint (sampler_state and extra must be JSON-able)",
        lambda: {k: hashlib.sha256(json.dumps(v, sort_keys=True).encode()).hexdigest() for k, v in description.items()},
    )
    for name in description:
        differing = [rank for rank, digest in enumerate(digests) if digest[name] != digests[0][name]]
        if differing:
            raise CheckpointError(f"not saved: {name} differs between rank 0 and ranks {differing[:8]}, but is saved once for all ranks")
