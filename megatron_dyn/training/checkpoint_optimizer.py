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

from typing import Any, Optional

import torch
import torch.distributed as dist
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

from megatron_dyn.training.checkpoint_files import CheckpointError

_PREFIX = "optimizer.state."
_MASTER_KEY = {"mixed": "fp32_param", "distributed": "param"}
_OF_THE_PARAMETERS = ("params", "step")
_STEPS_IN_STATE = (torch.optim.Adam, torch.optim.AdamW)  # fused optimizers count steps in their groups


class OptimizerPart:
    """Reads and writes one MegatronOptimizer's state.

    Args:
        optimizer: of one of the kinds above, or a ChainedOptimizer around exactly one.
        metadata: Megatron's sharded state dict metadata (sharding type, process group).

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

    @property
    def sharding(self) -> Optional[str]:
        return self.metadata["distrib_optim_sharding_type"] if self.kind == "distributed" else None

    # ---- saving --------------------------------------------------------------------------------------------

    def state(self, model_state: dict) -> dict:
        """Megatron's sharded state dict of the optimizer; collective for the distributed optimizer."""
        self._materialize()
        return self.optimizer.sharded_state_dict(model_state, metadata=self.metadata)

    def groups(self) -> dict:
        """Step count and the parameter groups of all ranks without their parameters; collective.

        Pipeline stages may have different groups (a stage with an embedding only has no norms), so rank 0's are not enough.
        """
        mine = [{k: v for k, v in group.items() if k not in _OF_THE_PARAMETERS} for group in self.inner.param_groups]
        everybodys: list = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, mine)
        union = {_identity(group): group for groups in reversed(everybodys) for group in groups}
        return {"groups": list(union.values()), "step": self._step()}

    def _step(self) -> Optional[int]:
        steps = {int(s["step"]) for s in self.inner.state.values() if "step" in s}
        steps |= {int(group["step"]) for group in self.inner.param_groups if "step" in group and group["params"]}
        if len(steps) > 1:
            raise CheckpointError(f"the optimizer's parameters have different step counts ({sorted(steps)}): cannot be saved")
        return steps.pop() if steps else None

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
        """What to read, for a checkpoint whose optimizer is described by `saved` ({"kind", "sharding"}).

        Raises:
            CheckpointError: the saved form cannot be read by this optimizer.
        """
        if saved["kind"] != self.kind and "dp_reshardable" in (saved["sharding"], self.sharding):
            raise CheckpointError(
                f"the optimizer state was saved by a {saved['kind']} optimizer ({saved['sharding']}) and this is a {self.kind} one: "
                "only fully reshardable states can change. Load with the same setting of the distributed optimizer."
            )
        if {saved["kind"], self.kind} == {"float32", "mixed"}:
            raise CheckpointError("the optimizer state was saved in another precision; load with the precision it was saved in")
        if saved["sharding"] == "dp_reshardable":
            self.metadata = {**self.metadata, "distrib_optim_sharding_type": "dp_reshardable"}
        self._materialize()
        loading = {"is_loading": True} if self.kind == "distributed" else {}
        state = self.optimizer.sharded_state_dict(model_state, metadata=self.metadata, **loading)
        if self.sharding == "dp_reshardable":  # keeps notes of its own between the tensors, which are not read
            return state
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

    def restore(self, loaded: dict, common: dict, *, keep_settings: bool) -> None:
        """Put the read state into the optimizer.

        Args:
            loaded: the tensors of `request`, read.
            common: what `groups` returned when the checkpoint was saved.
            keep_settings: the groups keep this run's learning rates, betas and so on instead of the checkpoint's.
        """
        groups, step = self._matched_groups(common["groups"], keep_settings), common["step"]
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
        if self.sharding == "dp_reshardable":
            self.optimizer.load_parameter_state_from_dp_reshardable(param_state)
        else:
            self._insert_own_masters(param_state)
            self.optimizer.load_parameter_state_from_fully_reshardable(param_state)
        for parameter, step in steps.items():
            self.inner.state[parameter]["step"] = step

    def _insert_own_masters(self, param_state: dict) -> None:
        """Masters that were not asked for are the (already read) fp32 parameters themselves."""
        in_order = [p for buffer in self.optimizer.buffers for p in buffer.param_index_map]
        for index, of_parameter in param_state.items():
            of_parameter.setdefault("param", in_order[index].detach())

    def _matched_groups(self, saved_groups: "list[dict]", keep_settings: bool) -> "list[dict]":
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
