# SPDX-License-Identifier: Apache-2.0
"""The tables of `python -m megatron_dyn plan`, as texts."""

import math
from collections.abc import Sequence

from megatron_dyn.planning.page import TableOf
from megatron_dyn.planning.report import TITLES, PlanReport
from megatron_dyn.training.memory import CONTEXT_BYTES, GIB, MARGIN
from megatron_dyn.training.plan_from_settings import in_flags
from megatron_dyn.training.recommend import Recommendation


IDLE_WORTH_A_WARNING = 0.1
"""Share of ranks, or of microbatches, that hold no document."""


def counted(count: int, thing: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {thing}" + ("" if count == 1 else "es" if thing.endswith("ch") else "s")


def warnings_of(report: PlanReport) -> list[str]:
    """What a user should change before training."""
    settings, pipeline = report.settings, report.pipeline
    ranks, total = settings["data_parallel_size"], report.ways["planned"].microbatches
    idle, empty = report.idle_ranks / ranks, report.fillers / total
    if max(idle, empty) < IDLE_WORTH_A_WARNING:
        return []
    slots = round(total / report.steps)
    flag = "--global-batch-size" if settings["global_batch_size"] is not None else "--global-batch-tokens"
    tokens = slots * settings["max_tokens_per_microbatch"]
    documents = math.ceil(tokens * report.documents / max(report.tokens, 1))
    amount = f"{documents:,}" if flag == "--global-batch-size" else f"{tokens:,}"
    who = f"{report.idle_ranks:,.1f} of {ranks:,} data-parallel ranks hold no document" if idle >= IDLE_WORTH_A_WARNING else (
        f"{empty:.0%} of the microbatches hold no document"
        + (f" (every rank runs a multiple of {settings['microbatch_multiple']})" if pipeline["virtual_stages"] > 1 else "")
    )
    return [
        f"WARNING: {who} and compute padding alone: a step holds {counted(round(report.documents / report.steps), 'document')}, too few for "
        f"{counted(slots, 'microbatch')}. Raise {flag} (about {amount} fill each once), or use fewer ranks"
    ]


def facts_table(report: PlanReport, *, part: str = "", blend: Sequence[str] = ()) -> TableOf:
    """What the plans hold.

    Args:
        part: which part of the corpus was planned.
        blend: what an epoch repeats of which corpus.
    """
    corpus = report.corpus
    lengths = corpus["length_quantiles"]
    rows = [
        (
            "corpus",
            (f"{part}: " if part else "")
            + f"{counted(corpus['documents'], 'document')}, {corpus['tokens']:,} tokens, {'about ' * corpus['steps_estimated']}{counted(corpus['steps'], 'step')} an epoch",
        ),
        *(("" if position else "blend", line) for position, line in enumerate(blend)),
        (
            "lengths",
            f"median {lengths['0.5']:,}, mean {corpus['mean_length']:,.0f}, 90% {lengths['0.9']:,}, 99% {lengths['0.99']:,}, "
            f"longest {lengths['1']:,}",
        ),
        (
            "planned",
            f"{counted(report.steps, 'step')}, {counted(report.documents, 'document')}, {report.tokens:,} tokens "
            f"({report.loss_tokens:,} with a label)",
        ),
        (
            "T",
            f"{report.distinct_T:,} different, {report.T_min:,} to {report.T_max:,}, mean {report.T_mean:,.1f}; "
            f"capacity {report.capacity:,}",
        ),
        ("padding", f"{report.padding:,} tokens; {counted(report.fillers, 'microbatch')} without documents"),
        (
            "above the budget",
            f"{counted(report.split_documents, 'document')} split, {report.truncated_documents:,} truncated ({report.truncated_tokens:,} tokens), "
            f"{report.dropped_documents:,} dropped ({report.dropped_tokens:,} tokens); {corpus['empty_documents']:,} are empty",
        ),
        (
            "time of a plan",
            f"mean {report.plan_ms.mean:.1f} ms, 99% {report.plan_ms.p99:.1f} ms; to open {report.open_seconds:.2f} s, the first plan "
            f"{report.first_plan_ms:.1f} ms",
        ),
    ]
    return TableOf(rows=rows, notes=warnings_of(report))


def ways_table(report: PlanReport) -> TableOf:
    """A column for the planned way and for each of the others."""
    pipeline, ways = report.pipeline, list(report.ways.values())
    schedule = f"PP {pipeline['pipeline_parallel']}" + (f", VPP {pipeline['virtual_stages']}" if pipeline["virtual_stages"] > 1 else "")
    rows: list[tuple[str, ...]] = [
        ("microbatches a rank", *(f"{count:,.1f}" if count >= 0.1 else f"{count:.1g}" for count in (way.microbatches_per_rank for way in ways))),
        ("fill", *(f"{way.fill:.1%}" for way in ways)),
        ("slot fill", *(f"{way.slot_fill:.1%}" for way in ways)),
    ]
    for name, title, digits in (
        ("microbatch_cost", "microbatches: cost", 3), ("microbatch_tokens", "microbatches: tokens", 3),
        ("rank_cost", "ranks: cost", 4), ("rank_tokens", "ranks: tokens", 4),
    ):  # fmt: skip
        found = [getattr(way, name) for way in ways]
        rows.append((f"{title}, mean", *(f"{spread.mean:.{digits}f}" for spread in found)))
        rows.append((f"{title}, 99%", *(f"{spread.p99:.{digits}f}" for spread in found)))
    rows += [
        ("microbatches above B", *(f"{way.over_budget:,}" for way in ways)),
        ("documents cut", *(f"{way.cut_documents:,}" for way in ways)),
        ("total cost", *(f"{way.cost:.3f}" for way in ways)),
        ("simulated time", *(f"{way.time:.3f}" for way in ways)),
    ]
    others = [f"{way.short}: {way.title}" for way in ways[1:]]
    notes = [
        "Microbatches and ranks: largest / mean of a step (1 at best), its mean and 99th percentile over the steps. Total cost and "
        f"time: against the planned way, padding counted for all (rows take matrix products, real tokens attention; [batch, length] layouts "
        f"attend over padding too); time is simulated ({schedule}, the slowest rank decides)."
        + (f" {'; '.join(others)}." if others else ""),
    ]
    notes += [
        f"{TITLES[name][0]} is left out: dividing so many documents into so many microbatches that way would take too long (fewer --steps "
        "bring it back; --no-compare leaves all out)"
        for name in report.skipped_ways
    ]
    title = "The same documents, divided in other ways" if others else "Balance"
    return TableOf(columns=("", *(way.short for way in ways)), rows=rows, title=title, notes=notes)


def recommendation_tables(found: Recommendation) -> list[TableOf]:
    """The proposal, the memory behind it, and what was weighed."""
    memory = found.memory
    proposal = [("--max-tokens-per-microbatch", f"{found.max_tokens_per_microbatch}")]
    if found.global_batch_tokens is not None:
        proposal.append(("--global-batch-tokens", f"{found.global_batch_tokens}"))
    if found.token_bucket is not None:
        proposal.append(("--token-bucket", f"{found.token_bucket}"))
    proposal += [("why", reason) for reason in found.reasons]
    rank = "the only pipeline rank" if memory.output_bytes and memory.pipeline_rank == 0 else f"pipeline rank {memory.pipeline_rank}"
    fixed = [
        ("weights, gradients, Adam", f"{memory.state_bytes / GIB:.2f} GiB ({memory.parameters / 1e9:.3f} billion parameters on {rank})"),
        (
            "activations",
            f"{memory.token_bytes / 1024:,.0f} KiB a token of B: {memory.layers_in_flight:g} layers in flight at "
            f"{memory.layer_bytes / 1024:.1f} KiB where kept whole, output layer {memory.output_bytes / 1024:,.0f} KiB, UserBuffers "
            f"{memory.buffer_bytes / 1024:,.0f} KiB",
        ),
        ("workspaces, copies of weights", f"{memory.workspace_bytes / GIB:.2f} GiB"),
        ("context", f"{CONTEXT_BYTES / GIB:g} GiB, and {MARGIN:.0%} of the device left alone (assumed)"),
        ("largest B", f"{found.largest_budget:,} on a device of {found.device_memory_gib:g} GiB"),
    ]
    budgets = TableOf(
        title="Budgets, planned on these documents",
        columns=("B", "GiB", "tokens", "documents", "K", "fill", "cut", "busy"),
        rows=[
            (
                f"{choice.max_tokens_per_microbatch:,}", f"{choice.memory_gib:.1f}", f"{choice.global_batch_tokens:,.0f}",
                f"{choice.global_batch_documents:,.0f}", f"{choice.microbatches_per_rank:.1f}", f"{choice.fill:.1%}",
                f"{choice.cut_documents:.2%}",
                f"{choice.busy:.1%}",
            )
            for choice in found.budgets
        ],
        notes=[
            "GiB: estimated; tokens and documents of a step; K: microbatches a rank; cut: documents longer than B; busy: what padding, "
            "imbalance and the pipeline's bubbles leave of the machine, simulated.",
            *(f"B {tokens:,} is impossible: {in_flags(reason)}" for tokens, reason in found.impossible.items()),
        ],
    )  # fmt: skip
    buckets = TableOf(
        title="Token buckets at the proposed B",
        columns=("bucket", "different T", "slot fill"),
        rows=[(f"{choice.token_bucket:,}", f"{choice.distinct_T:,}", f"{choice.slot_fill:.2%}") for choice in found.buckets],
    )
    notes = [
        "An estimate by formula (docs/planning.md), for Transformer Engine's layers; nothing was measured here. Fragmentation and the buffers of "
        "collectives are in the margin. Before a long run try a few steps at the proposed B, which is also the largest T, or let the run measure "
        "it: --max-tokens-per-microbatch auto.",
    ]
    return [TableOf(rows=proposal), TableOf(title="Memory of the fullest rank", rows=fixed, notes=notes), budgets, buckets]
