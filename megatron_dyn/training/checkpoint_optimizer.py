# SPDX-License-Identifier: Apache-2.0
"""The optimizer's part of a checkpoint, independent of how the optimizer is distributed.

| kind          | Megatron's class                     | keys of the tensors for a parameter KEY (prefix `optimizer.state.`)     |
|---------------|--------------------------------------|-------------------------------------------------------------------------|
| `float32`     | FP32Optimizer                        | exp_avg.KEY, exp_avg_sq.KEY (the parameter is its own master)            |
| `mixed`       | Float16OptimizerWithFloat16Params    | exp_avg.KEY, exp_avg_sq.KEY, fp32_param.KEY                              |
| `distributed` | DistributedOptimizer, any precision  | exp_avg.KEY, exp_avg_sq.KEY, param.KEY (fp32 master; the parameter itself if fp32) |

The moments have the same keys and shapes, so a checkpoint of one kind is read by another by asking for the master under the
other's key. Groups and step count go beside them in one form for all kinds (`optimizer_groups` of the common state).
"""

import contextlib
from typing import Any, Iterator, Optional

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)

from megatron_dyn.training.checkpoint_files import CheckpointError, on_every_rank

_PREFIX = "optimizer.state."
_MASTER_KEY = {"mixed": "fp32_param", "distributed": "param"}
_OF_THE_PARAMETERS = ("params", "step")
_STEPS_IN_STATE = (torch.optim.Adam, torch.optim.AdamW)  # fused optimizers count steps in their groups


class OptimizerPart:
    """Reads and writes one MegatronOptimizer's state.

    Args:
        optimizer: of one of the kinds above, or a ChainedOptimizer around exactly one.
        metadata: Megatron's sharded state dict metadata (process group and so on; its sharding type must be "fully_reshardable").

    Raises:
        CheckpointError: an optimizer of another class, or one with a loss scaler.
    """

    def __init__(self, optimizer: MegatronOptimizer, metadata: dict):
        chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        kinds = {DistributedOptimizer: "distributed", Float16OptimizerWithFloat16Params: "mixed", FP32Optimizer: "float32"}
        self.optimizer = chained[0]
        self.kind = kinds.get(type(self.optimizer))
        if len(chained) != 1 or self.kind is None or self.optimizer.optimizer is None:
            names = ", ".join(type(o).__name__ for o in chained)
            raise CheckpointError(f"checkpoints of this optimizer are not supported: {names} ({len(chained)} in a chain)")
        if getattr(self.optimizer, "grad_scaler", None) is not None:
            raise CheckpointError("checkpoints of loss scaling (fp16) are not supported: train in bf16 or fp32")
        self.inner = self.optimizer.optimizer
        self.metadata = metadata

    # ---- saving --------------------------------------------------------------------------------------------

    def state(self, model_state: dict) -> dict:
        """Megatron's sharded state dict of the optimizer; collective for the distributed optimizer.

        Raises:
            CheckpointError: on every rank, if the distributed optimizer's gathered state is not what every rank's shard holds.
        """
        self._materialize()
        if self.kind != "distributed":
            return self.optimizer.sharded_state_dict(model_state, metadata=self.metadata)
        with _padding_kept(self.optimizer):
            state = self.optimizer.sharded_state_dict(model_state, metadata=self.metadata)
        on_every_rank("gather the optimizer's state", lambda: self._require_own_shards(state["param_state"]))
        return state

    def _require_own_shards(self, param_state: dict) -> None:
        """Megatron cuts the gathered buffers by position, and where it finds too little it only warns and fills up with zeros."""
        for index, parameter in enumerate(self._in_buffer_order()):
            if parameter not in self.optimizer.model_param_gbuf_map:
                continue  # another data-parallel rank has it, and looks
            here = self.optimizer._get_model_param_range_map(parameter)["param"]
            shard = self.optimizer._get_main_param_and_optimizer_states(parameter)
            for name, whole in param_state[index].items():
                gathered, mine = whole.data.flatten()[here.start : here.end], shard[name].detach().cpu()
                if not torch.equal(gathered.view(torch.int32), mine.view(torch.int32)):  # bits, so that NaN equals NaN
                    raise CheckpointError(
                        f"{whole.key} was not gathered as its shards hold it, and a resumed run would learn from wrong numbers; nothing "
                        "was saved. Megatron-Core's gradient buffers are laid out in an unknown way: use version 0.16.1, or train "
                        "without --use-distributed-optimizer"
                    )

    def _in_buffer_order(self) -> "list[torch.nn.Parameter]":
        """The order by which Megatron counts the entries of `param_state`."""
        return [parameter for buffer in self.optimizer.buffers for parameter in buffer.param_index_map]

    def groups(self) -> dict:
        """Step count and the parameter groups of all ranks without their parameters; collective.

        Pipeline stages may have different groups (a stage with an embedding only has no norms), so rank 0's are not enough.

        Raises:
            CheckpointError: on every rank, if parameters of any ranks are at different steps.
        """
        mine = [{k: v for k, v in group.items() if k not in _OF_THE_PARAMETERS} for group in self.inner.param_groups]
        everybodys = on_every_rank("describe the optimizer", lambda: (mine, self._steps()))
        union = {_identity(group): group for groups, _ in reversed(everybodys) for group in groups}
        steps = set().union(*(of_rank for _, of_rank in everybodys))
        if len(steps) > 1:
            raise CheckpointError(f"the optimizer's parameters have different step counts ({sorted(steps)}): cannot be saved")
        return {"groups": list(union.values()), "step": steps.pop() if steps else None}

    def _steps(self) -> "set[int]":
        steps = {int(s["step"]) for s in self.inner.state.values() if "step" in s}
        return steps | {int(group["step"]) for group in self.inner.param_groups if "step" in group and group["params"]}

    def _materialize(self) -> None:
        """Make the moments that the optimizer makes at its first step, as it would: zero, at step 0."""
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                state = self.inner.state[parameter]
                if state or parameter.numel() == 0:
                    continue
                if isinstance(self.inner, _STEPS_IN_STATE):
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                elif isinstance(self.inner, torch.optim.SGD):
                    if group["momentum"]:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                else:
                    self.optimizer.init_state_fn(self.inner, self.optimizer.config)

    # ---- loading -------------------------------------------------------------------------------------------

    def request(self, model_state: dict, saved: dict) -> dict:
        """What to read, for a checkpoint whose optimizer is described by `saved` ({"kind"}).

        Raises:
            CheckpointError: the saved form cannot be read by this optimizer.
        """
        if {saved["kind"], self.kind} == {"float32", "mixed"}:
            raise CheckpointError("the optimizer state was saved in another precision; load with the precision it was saved in")
        self._materialize()
        if self.kind == "distributed":
            with _padding_kept(self.optimizer):  # only the shapes count here
                state = self.optimizer.sharded_state_dict(model_state, metadata=self.metadata, is_loading=True)
        else:
            state = self.optimizer.sharded_state_dict(model_state, metadata=self.metadata)
        tensors, _ = extract_sharded_base(state)
        if saved["kind"] != self.kind and self.kind in _MASTER_KEY:
            self._ask_for_other_master(tensors, saved["kind"])
        return tensors

    def _ask_for_other_master(self, tensors: dict, saved_kind: str) -> None:
        mine = f"{_PREFIX}{_MASTER_KEY[self.kind]}."
        if saved_kind == "float32":  # the parameter is its own master, and is read with the model
            for of_parameter in tensors["param_state"].values():
                del of_parameter["param"]
            return
        theirs = f"{_PREFIX}{_MASTER_KEY[saved_kind]}."

        def rename(item: Any) -> Any:
            if isinstance(item, ShardedBase) and item.key.startswith(mine):
                item.key = theirs + item.key[len(mine) :]
            return item

        dict_list_map_inplace(rename, tensors)

    def restore(self, loaded: dict, groups: "list[dict]", step: Optional[int]) -> None:
        """Put the read state into the optimizer.

        Args:
            loaded: the tensors of `request`, read.
            groups: as `matched_groups` returned them.
            step: as `groups` returned it when the checkpoint was saved.
        """
        stamped = groups if step is None else [{**group, "step": step} for group in groups]
        if self.kind == "distributed":
            self.optimizer.load_state_dict({"optimizer": {"param_groups": stamped}})
            self._restore_shards(loaded["param_state"])
            if isinstance(self.inner, _STEPS_IN_STATE):
                for group in self.inner.param_groups:
                    group.pop("step", None)  # Megatron leaves it there, where torch's Adam would never count it up
            return
        tensors = (loaded if self.kind == "float32" else loaded["optimizer"]).get("state", {})
        if isinstance(self.inner, _STEPS_IN_STATE):  # Megatron copies it into every parameter's state
            inner = {"state": {**tensors, "common_step": torch.tensor(float(step))}, "param_groups": groups}
        else:
            inner = {"state": tensors, "param_groups": stamped}
        mixed = {"optimizer": inner, "fp32_from_fp16_params": loaded.get("fp32_from_fp16_params")}
        self.optimizer.load_state_dict(inner if self.kind == "float32" else mixed)

    @torch.no_grad()
    def _restore_shards(self, param_state: dict) -> None:
        """Cut the read tensors into this rank's shards.

        Megatron-Core 0.16.1 fails here with torch's Adam, which has a `step` beside the moments: the loader looks for it among
        the tensors. Before that it gave all parameters one step tensor, which each of them would then count up.
        """
        steps = {parameter: state.pop("step").clone() for parameter, state in self.inner.state.items() if "step" in state}
        self._insert_own_masters(param_state)
        self.optimizer.load_parameter_state_from_fully_reshardable(param_state)
        for parameter, step in steps.items():
            self.inner.state[parameter]["step"] = step

    def _insert_own_masters(self, param_state: dict) -> None:
        """Masters that were not asked for are the (already read) fp32 parameters themselves."""
        in_order = self._in_buffer_order()
        for index, of_parameter in param_state.items():
            of_parameter.setdefault("param", in_order[index].detach())

    def matched_groups(self, saved_groups: "list[dict]", *, keep_settings: bool) -> "list[dict]":
        """This rank's parameter groups with the settings of the saved ones.

        Args:
            saved_groups: the groups which `groups` returned when the checkpoint was saved.
            keep_settings: keep this run's learning rates, betas and so on instead of the checkpoint's.

        Raises:
            CheckpointError: on this rank, if the checkpoint lacks a group; `on_every_rank` is the caller's.
        """
        saved = {_identity(group): group for group in saved_groups}
        matched = []
        for group, indexed in zip(self.inner.param_groups, self.inner.state_dict()["param_groups"]):
            if _identity(group) not in saved:
                names = dict(zip(param_group_identifier_keys, _identity(group)))
                raise CheckpointError(f"the checkpoint has no parameter group with {names}: it has {list(saved)}")
            settings = indexed if keep_settings else saved[_identity(group)]
            matched.append({**{k: v for k, v in settings.items() if k != "step"}, "params": indexed["params"]})
        return matched


def _identity(group: dict) -> tuple:
    return tuple(group[key] for key in param_group_identifier_keys)


@contextlib.contextmanager
def _padding_kept(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Let the optimizer gather its buffers as they are laid out: every bucket with the padding at its end.

    | buffer of two buckets, the first with 28 elements of padding | elements           | where b lies |
    |--------------------------------------------------------------|--------------------|--------------|
    | `param_index_map`, and what is returned here                 | a[100] 0[28] b[50] | 128..178     |
    | what `get_parameter_state_dp_zero` returns                   | a[100] b[50]       | 100..150     |

    Megatron-Core 0.16.1 cuts the second by the positions of the first, so that every parameter after the first padded bucket gets
    another one's masters and moments, or zeros. Source: `DistributedOptimizer.sharded_param_state_fully_reshardable`, and its repair in
    https://github.com/NVIDIA/Megatron-LM/pull/5077 (which moves the positions instead; under a version with it, saving is refused).
    """
    gather = optimizer.get_parameter_state_dp_zero

    def gather_with_padding(**options: bool) -> dict:
        state = gather(**options)
        for index, buffer in enumerate(optimizer.buffers):
            sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            for world in state[index].values():
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    world[name] = torch.cat([F.pad(part, (0, pad)) for part, pad in zip(world[name].split(sizes), padding)])
        return state

    optimizer.get_parameter_state_dp_zero = gather_with_padding
    try:
        yield
    finally:
        del optimizer.get_parameter_state_dp_zero  # the class's own again
