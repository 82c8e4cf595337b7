# SPDX-License-Identifier: Apache-2.0
"""From arguments to a finished run: check, start the process groups, build the parts, train.

Everything that can be refused without other ranks is refused before a process group exists, by the same text on every rank.
"""

import contextlib
import dataclasses
import importlib.util
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_dyn
from megatron_dyn import device, userbuffers
from megatron_dyn.corpus import CorpusError
from megatron_dyn.microbatch import StreamError
from megatron_dyn.pipeline.agreement import Agreement, AgreementError
from megatron_dyn.planning import PlanError, TokenBudgetBatchSampler
from megatron_dyn.planning.cost_file import doubts
from megatron_dyn.training.agreed_steps import step_meetings
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.budget_probe import check_memory_limit, with_found_budget
from megatron_dyn.training.build import run_model
from megatron_dyn.training.checkpoint import CheckpointError, CheckpointManager
from megatron_dyn.training.config import ConfigError
from megatron_dyn.training.distributed import initialize, meet_ranks, rank_from_environment, world_size_from_environment
from megatron_dyn.training.evaluate import Evaluator
from megatron_dyn.training.failure_board import FailureBoard
from megatron_dyn.training.facts import TRAINING_DOCUMENTS, VALIDATION_DOCUMENTS, run_facts
from megatron_dyn.training.folders import FolderLocks
from megatron_dyn.training.inputs import Inputs
from megatron_dyn.training.job_failure import is_lost_peer, report, tell
from megatron_dyn.training.job_watch import JobWatch
from megatron_dyn.training.loop import Trainer
from megatron_dyn.training.metrics_file import MetricsError
from megatron_dyn.training.memory_advice import advice_for
from megatron_dyn.training.model import padded_vocab_size
from megatron_dyn.training.nonfinite import NonFiniteError
from megatron_dyn.training.optimizer import build_optimizer, wrap_models
from megatron_dyn.training.overlap import prepare_overlap
from megatron_dyn.training.progress import PROGRESS, JobEnded, Standing
from megatron_dyn.training.rendezvous import Meeting, RefusedError, meet, uses_launchers_store
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.run_log import RunLog
from megatron_dyn.training.step import Stepper
from megatron_dyn.training.stop_request import StopRequest
from megatron_dyn.userbuffers import ActiveShapeError, OverlapConfigError
from megatron_dyn.userbuffers.native_build import NativeBuildError

# What a user can mend: told in one line a rank, without a traceback.
_EXPLAINED = (
    ActiveShapeError, AgreementError, CheckpointError, ConfigError, CorpusError, JobEnded, NativeBuildError, NonFiniteError, OverlapConfigError,
    PlanError, RefusedError, StreamError, OSError,
)  # fmt: skip


FAILED, REFUSED = 1, 2
"""Exit status where a run failed (started again, it goes on from its last checkpoint), and where it never made a step (mend what it says)."""


def main(argv: list[str] | None = None, *, stop: StopRequest | None = None) -> int:
    """Entry of `pretrain_gpt_thd.py`.

    Args:
        argv: Arguments; None takes the process's.
        stop: Listens since before this module was imported; None begins to listen now.

    Returns:
        Exit status, the same on all ranks: 0 finished or asked to stop (state saved), 1 failed, 2 refused before the first step.
    """
    stop = StopRequest() if stop is None else stop
    PROGRESS.restart()
    try:
        run = parse_arguments(sys.argv[1:] if argv is None else argv, world_size=world_size_from_environment())
        check_memory_limit(run)
        inputs = Inputs(run)
    except (ConfigError, CorpusError, PlanError, OSError) as error:
        print(f"pretrain_gpt_thd.py: error: {error}", file=sys.stderr, flush=True)
        _tell_ranks_that_wait(error)
        return REFUSED
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # a defect, or memory that ran out: the others must not wait for this rank
        if isinstance(error, SystemExit) and not error.code:  # --help
            raise
        traceback.print_exc()
        _tell_ranks_that_wait(error)
        return REFUSED
    watch = None
    try:
        meeting = meet(timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes))
        watch = _watch(run, meeting, stop)
        pretrain(run, inputs, meeting, stop=stop, watch=watch)
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # whatever makes one rank leave takes the others along
        standing = PROGRESS.standing
        status = _status(error, standing)
        told = tell(error, standing, budget=inputs.budget, explained=_EXPLAINED, advice=lambda: advice_for(run, inputs))
        if watch is not None:
            text = report(error, told, watch, standing, status=status)
        else:
            text = str(error) if isinstance(error, RefusedError) else told.text  # it names the rank that refused
        if text:
            print(f"[rank {rank_from_environment()}] {text}", file=sys.stderr, flush=True)
        return status if watch is None or watch.root is None else watch.root.status
    finally:
        if watch is not None:
            watch.close()
        stop.close()
    return 0 if watch.root is None else watch.root.status


def _status(error: BaseException, standing: Standing) -> int:
    """Exit status for what a rank raised."""
    return REFUSED if standing.step is None and isinstance(error, _EXPLAINED) and not is_lost_peer(error) else FAILED


def _watch(run: RunConfig, meeting: Meeting, stop: StopRequest) -> JobWatch:
    board = FailureBoard(meeting.client("failures"), rank=meeting.rank, world=meeting.world)
    times = dict(heartbeat_secs=run.parallel.heartbeat_timeout, stall_secs=run.parallel.stall_timeout_secs)
    return JobWatch(board, hosts_store=meeting.hosts_store, stop=stop, **times).start()


def _tell_ranks_that_wait(error: BaseException) -> None:
    """A refusal on this rank alone (a file that its node lacks) must not leave the others at the rendezvous until it times out."""
    if uses_launchers_store():  # else it is rank 0's, which may have refused as well
        with contextlib.suppress(RuntimeError):
            meet(timeout=timedelta(seconds=10), refusal=f"{type(error).__name__}: {error}")


def pretrain(run: RunConfig, inputs: Inputs, meeting: Meeting, *, stop: StopRequest, watch: JobWatch) -> None:
    """Train as told; the state is saved on the way and at the end.

    Args:
        run: Settings.
        inputs: What the run reads.
        meeting: Where the ranks have met.
        stop: A request that the loop looks at.
        watch: Looks at the other ranks.

    Raises:
        AgreementError: The ranks hold different plans, or one of them failed.
        NonFiniteError: The loss or a gradient is NaN or infinite, and the policy is to stop.
        CheckpointError: A checkpoint cannot be read or written.
    """
    device.replace_what_is_missing(inputs.process_group_backend)
    facts = run_facts(run, inputs)
    of_rank_0 = meet_ranks(run.parallel, meeting, backend=inputs.process_group_backend, facts=facts)
    if not inputs.reads_tokens:
        inputs.adopt_fingerprints(run, training=of_rank_0[TRAINING_DOCUMENTS], validation=of_rank_0[VALIDATION_DOCUMENTS])
    agreement = Agreement(initialize(run.parallel, backend=inputs.process_group_backend, seed=run.training.seed))
    locks, failure = None, None
    try:
        locks = FolderLocks(inputs.folders) if dist.get_rank() == 0 else None
    except (ConfigError, OSError) as error:
        failure = error
    agreement.check("the run", "", error=failure)
    extension, failure = "", None
    try:
        extension = prepare_overlap(run, inputs.layers)
    except (NativeBuildError, OSError) as error:
        failure = error
    agreement.check("the UserBuffers extension", extension, error=failure)

    manager = None
    if run.checkpoint.save or run.checkpoint.load:
        manager = CheckpointManager(
            save=run.checkpoint.save, load=run.checkpoint.load, keep_last=run.checkpoint.keep_last, vocab_size=inputs.vocab_size
        )
    budget = ""
    found = None
    if run.data.finds_budget:
        run, budget, found = with_found_budget(run, inputs, agreement, manager)

    PROGRESS.mark("building the model")
    rank = parallel_state.get_data_parallel_rank()
    config, chunks, overlap = run_model(
        run, vocab_size=inputs.vocab_size, layers=inputs.layers, process_group_backend=inputs.process_group_backend
    )
    parameters = _parameters(chunks)
    models = wrap_models(chunks, config, run.parallel)
    optimizer, scheduler = build_optimizer(run, models)
    sampler = TokenBudgetBatchSampler(
        inputs.planner, data_parallel_rank=rank, override_data_mismatch=run.checkpoint.override_data_mismatch
    )
    progress = {"iteration": 0, "consumed_tokens": 0, "consumed_documents": 0, "evaluated_iteration": None}

    resumed = ""
    if manager is not None:
        PROGRESS.mark("loading")
        state = manager.load(models=models, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
        if state is not None:
            progress = {"iteration": state.iteration, **{name: state.extra[name] for name in progress if name != "iteration"}}
            resumed = f"continued from iteration {state.iteration} of {run.checkpoint.load}"
        elif run.checkpoint.load:
            resumed = f"no checkpoint in {run.checkpoint.load}: starting from iteration 0"

    meetings = step_meetings(run, inputs.planner, inputs.splits.train, inputs.pad_token_id)
    evaluator = None
    if inputs.validation_planner is not None:
        evaluator = Evaluator(
            inputs.splits.valid,
            inputs.validation_planner,
            steps=run.training.eval_iters,
            data_parallel_rank=rank,
            pad_token_id=inputs.pad_token_id,
            **step_meetings(run, inputs.validation_planner, inputs.splits.valid, inputs.pad_token_id),
            timeout_secs=run.parallel.data_timeout_secs,
        )
    log = RunLog(
        run.logging.run_dir,
        enabled=dist.get_rank() == 0,
        total_iterations=run.training.train_iters,
        start_iteration=progress["iteration"],
        log_interval=run.logging.log_interval,
        header=_header(run, inputs, parameters) | ({"overlap": overlap} if overlap else {}),
        tensorboard=run.logging.tensorboard,
        about=_about(run, inputs, parameters) | ({"budget": dataclasses.asdict(found)} if found else {}),
    )
    failure = None
    try:
        log.start()
    except (OSError, MetricsError) as error:
        failure = error
    agreement.check("the run's folder", "", error=failure)
    with contextlib.closing(log):
        for notice in filter(None, (budget, resumed)):
            log.notice(notice)
        if run.data.cost_file:
            for doubt in doubts(run.data.cost_file, vars(run.model)):
                log.warning(doubt)
        for override in sampler.overrides:
            log.warning(f"the data order is another after iteration {override['step']} (--override-data-mismatch): {'; '.join(override['changed'])}")
        if progress["iteration"] >= run.training.train_iters:
            log.notice(f"iteration {progress['iteration']} is at or past --train-iters {run.training.train_iters}: nothing to train")
        trainer = Trainer(
            run,
            stepper=Stepper(models, optimizer, scheduler, measure_waits=run.logging.measure_pipeline_bubble),
            corpus=inputs.splits.train,
            planner=inputs.planner,
            sampler=sampler,
            evaluator=evaluator,
            checkpoints=manager,
            **meetings,
            log=log,
            data_parallel_rank=rank,
            pad_token_id=inputs.pad_token_id,
            progress=progress,
        )
        trainer.train(stop)
        extra = {"parallel": _sizes(run, inputs), "parameters": parameters, "device": device.device_name()}
        if sampler.overrides:
            extra["data_overrides"] = sampler.overrides
        memory = device.memory_stats()
        if memory is not None:
            extra["peak_memory_gib"] = memory["peak_reserved"] / 2**30
        log.finish(extra)
    # A stall (say) that was declared while the last step ended ends the job all the same, on every rank.
    found = watch.finishing()
    agreement.check("the end of the run", "", error=None if found is None else JobEnded(str(found)))
    userbuffers.destroy_ub()
    dist.destroy_process_group()
    if locks is not None:
        locks.release()


def _about(run: RunConfig, inputs: Inputs, parameters: int) -> dict:
    """What `run.json` tells of a run: enough to compare it with others."""
    counted = run.model.cost_model(padded_vocab_size(inputs.vocab_size, run.model.make_vocab_size_divisible_by, run.parallel.tensor_model_parallel_size))
    return {
        "settings": run.as_dict(),
        "documents": {"train": inputs.splits.train.fingerprint, "valid": inputs.splits.valid.fingerprint if inputs.splits.valid is not None else None},
        "parameters": parameters,
        "parallel": _sizes(run, inputs),
        "device": device.device_name(),
        "layers": inputs.layers,
        # Of forward and backward without recomputation: operations = linear * tokens + quadratic * squared tokens.
        "operations": {"linear": counted.linear, "quadratic": counted.quadratic},
    }


def _header(run: RunConfig, inputs: Inputs, parameters: int) -> dict:
    plan, shape = inputs.plan_config, run.model
    batch = f"{plan.global_batch_size} documents" if plan.global_batch_size else f"{plan.global_batch_tokens} tokens"
    return {
        "megatron_dyn": f"{megatron_dyn.__version__} on {device.device_name()}, {run.precision}, {_kernels(inputs.layers)}",
        "parallel": ", ".join(f"{name} {size}" for name, size in _sizes(run, inputs).items()),
        "model": f"{parameters:,} parameters, {run.model.num_layers} layers, hidden {run.model.hidden_size}, vocabulary {inputs.vocab_size}",
        "": f"{shape.normalization}, {'SwiGLU' if shape.swiglu else 'GELU'}, positions {shape.position_embedding_type}, "
        f"{shape.num_attention_heads} heads in {shape.num_query_groups} groups, {'' if shape.add_bias_linear else 'no '}biases, "
        f"{'untied' if shape.untie_embeddings_and_output_weights else 'tied'} embeddings, dropout {shape.hidden_dropout}/{shape.attention_dropout}",
        "step": f"{batch} in microbatches of at most {plan.max_tokens_per_microbatch} tokens",
        "capacity": f"{plan.capacity} tokens ({plan.max_tokens_per_microbatch} rounded up to a multiple of {plan.alignment})",
        "corpus": list(inputs.splits.report),
    }


def _kernels(layers: str) -> str:
    """Which kernels the layers are made of, for the log. Megatron-Core takes fused optimizers from either package by itself."""
    if layers == "local":
        return "PyTorch kernels"
    found = {"Transformer Engine": "transformer_engine", "NVIDIA Apex": "apex"}
    return ", ".join(f"{name} {'found' if importlib.util.find_spec(module) else 'absent'}" for name, module in found.items())


def _sizes(run: RunConfig, inputs: Inputs) -> dict[str, int]:
    return {
        "TP": run.parallel.tensor_model_parallel_size,
        "SP": int(run.parallel.sequence_parallel),
        "PP": run.parallel.pipeline_model_parallel_size,
        "VPP": run.parallel.virtual_pipeline_model_parallel_size or 1,
        "DP": inputs.data_parallel_size,
    }


def _parameters(chunks: list) -> int:
    """Parameters of the whole model: this rank's, times the ranks that hold other parts; replicated ones count once.

    Pipeline stages differ in size; the sum over them is exact because every stage holds its own layers, and the copy that the last stage
    holds of tied embeddings is marked as shared.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    mine = sum(
        parameter.numel() * (tp if getattr(parameter, "tensor_model_parallel", False) else 1)
        for chunk in chunks
        for parameter in chunk.parameters()
        if not getattr(parameter, "shared", False)
    )
    count = torch.tensor([mine], dtype=torch.int64, device=device.compute_device())
    dist.all_reduce(count, group=parallel_state.get_pipeline_model_parallel_group())
    return int(count.item())
