# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's DDP, optimizer and parameter scheduler, set up for sums over tokens instead of means over microbatches."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron_dyn.training.config import OptimizerSettings, ParallelConfig
from megatron_dyn.training.run_config import RunConfig


def wrap_models(chunks: list[torch.nn.Module], config: TransformerConfig, parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """Put each model chunk into Megatron's DDP and bind the schedule's hooks.

    Gradients are summed in fp32 and divided once by the number of loss tokens of the whole step
    (`calculate_per_token_loss` and `finalize_model_grads`), whatever the partition into microbatches and ranks.

    Args:
        chunks: The model, or its virtual stages, on the compute device.
        config: The model's configuration; its hooks are set here.
        parallel: Which overlaps are wanted.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # the training step looks for itself: it can also say which microbatch it was
    )
    models = [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for model in models:
        model.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([model.no_sync for model in models])
        if len(models) > 1:
            config.grad_sync_func = [model.start_grad_sync for model in models]
    if parallel.overlap_param_gather and len(models) > 1:
        config.param_sync_func = [model.start_param_sync for model in models]
    return models


def build_optimizer(run: RunConfig, models: list[DistributedDataParallel]) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over fp32 master weights, and the scheduler of learning rate and weight decay.

    Weight decay reaches the optimizer through the scheduler alone: it is what leaves norm weights and biases out.

    Args:
        run: Settings.
        models: Chunks wrapped by `wrap_models`.
    """
    wanted = run.optimizer
    config = OptimizerConfig(
        optimizer=wanted.optimizer,
        lr=wanted.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        sgd_momentum=wanted.sgd_momentum,
        clip_grad=wanted.clip_grad,
        bf16=run.training.bf16,
        fp16=False,
        params_dtype=torch.bfloat16 if run.training.bf16 else torch.float32,
        use_distributed_optimizer=run.parallel.use_distributed_optimizer,
        overlap_param_gather=run.parallel.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, models, config_overrides=get_standard_config_overrides(config))
    return optimizer, _scheduler(run, wanted, optimizer)


def _scheduler(run: RunConfig, wanted: OptimizerSettings, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Counts optimizer steps (Megatron-LM counts samples, which differ in size here)."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=wanted.lr_warmup_init,
        max_lr=wanted.lr,
        min_lr=wanted.min_lr,
        lr_warmup_steps=run.lr_warmup_iters,
        lr_decay_steps=wanted.lr_decay_iters or run.training.train_iters,
        lr_decay_style=wanted.lr_decay_style,
        start_wd=wanted.weight_decay,
        end_wd=wanted.weight_decay,
        wd_incr_steps=run.training.train_iters,
        wd_incr_style="constant",
        wsd_decay_steps=wanted.lr_wsd_decay_iters,
        lr_wsd_decay_style=wanted.lr_wsd_decay_style if wanted.lr_decay_style == "WSD" else None,
        # The flags of the run that resumes decide, so that a run can be prolonged; the step count comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _one_or_all(functions: list) -> object:
    return functions[0] if len(functions) == 1 else functions
