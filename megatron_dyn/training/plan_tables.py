# SPDX-License-Identifier: Apache-2.0
"""The tables of `python -m megatron_dyn plan`, as texts."""

from megatron_dyn.planning.page import TableOf
from megatron_dyn.planning.report import PlanReport
from megatron_dyn.training.recommend import CONTEXT_BYTES, GIB, LEAST_SLOT_FILL, MARGIN, Recommendation


def facts_table(report: PlanReport) -> TableOf:
    """What the plans hold."""
    corpus = report.corpus
    lengths = corpus["length_quantiles"]
    rows = [
        ("corpus", f"{corpus['documents']:,} documents, {corpus['tokens']:,} tokens, {corpus['steps']:,} steps an epoch"),
        (
            "lengths",
            f"median {lengths['0.5']:,}, mean {corpus['mean_length']:,.0f}, 90% {lengths['0.9']:,}, 99% {lengths['0.99']:,}, "
            f"longest {lengths['1']:,}",
        ),
        (
            "planned",
            f"{report.steps:,} steps, {report.documents:,} documents, {report.tokens:,} tokens ({report.loss_tokens:,} with a label)",
        ),
        (
            "T",
            f"{report.distinct_T:,} different, {report.T_min:,} to {report.T_max:,}, mean {report.T_mean:,.1f}; "
            f"capacity {report.capacity:,}",
        ),
        ("padding", f"{report.padding:,} tokens; {report.fillers:,} microbatches without documents"),
        (
            "above the budget",
            f"{report.split_documents:,} documents split, {report.truncated_documents:,} truncated ({report.truncated_tokens:,} tokens), "
            f"{report.dropped_documents:,} dropped ({report.dropped_tokens:,} tokens); {corpus['empty_documents']:,} are empty",
        ),
        (
            "time of a plan",
            f"mean {report.plan_ms.mean:.1f} ms, 99% {report.plan_ms.p99:.1f} ms; to open {report.open_seconds:.2f} s, the first plan "
            f"{report.first_plan_ms:.1f} ms",
        ),
    ]
    return TableOf(rows=rows)


def ways_table(report: PlanReport) -> TableOf:
    """A column for the planned way and for each of the others."""
    pipeline, ways = report.pipeline, list(report.ways.values())
    schedule = f"PP {pipeline['pipeline_parallel']}" + (f", VPP {pipeline['virtual_stages']}" if pipeline["virtual_stages"] > 1 else "")
    rows: list[tuple[str, ...]] = [
        ("microbatches a rank", *(f"{way.microbatches_per_rank:,.1f}" for way in ways)),
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
        f"time: against the planned way; time is simulated ({schedule}, the slowest rank decides)."
        + (f" {'; '.join(others)}." if others else ""),
    ]
    title = "The same documents, divided in other ways" if others else "Balance"
    return TableOf(columns=("", *(way.short for way in ways)), rows=rows, title=title, notes=notes)


def recommendation_tables(found: Recommendation) -> list[TableOf]:
    """The proposal, the memory behind it, and what was weighed."""
    memory = found.memory
    proposal = [("--max-tokens-per-microbatch", f"{found.max_tokens_per_microbatch}")]
    if found.global_batch_tokens is not None:
        proposal.append(("--global-batch-tokens", f"{found.global_batch_tokens}"))
    bounds = f"the largest that keeps the slot fill at {LEAST_SLOT_FILL:.1%} or more; of use only where something is cached by shape"
    proposal.append(("--token-bucket", f"{found.token_bucket} (optional: {bounds})"))
    proposal += [("why", reason) for reason in found.reasons]
    rank = "the only pipeline rank" if memory.output_bytes and memory.pipeline_rank == 0 else f"pipeline rank {memory.pipeline_rank}"
    fixed = [
        ("weights, gradients, Adam", f"{memory.state_bytes / GIB:.2f} GiB ({memory.parameters / 1e9:.3f} billion parameters on {rank})"),
        (
            "activations",
            f"{memory.token_bytes / 1024:,.0f} KiB a token of B: {memory.layers_in_flight:g} layers in flight at "
            f"{memory.layer_bytes / 1024:.1f} KiB where kept whole, output layer {memory.output_bytes / 1024:,.0f} KiB",
        ),
        ("context, workspaces", f"{CONTEXT_BYTES / GIB:g} GiB, and {MARGIN:.0%} of the device left alone (assumed)"),
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
            "GiB: estimated; tokens and documents of a step; K: microbatches a rank; cut: documents longer than B; busy: what imbalance "
            "and the pipeline's bubbles leave of the machine, simulated."
        ],
    )  # fmt: skip
    buckets = TableOf(
        title="Token buckets at the proposed B",
        columns=("bucket", "different T", "slot fill"),
        rows=[(f"{choice.token_bucket:,}", f"{choice.distinct_T:,}", f"{choice.slot_fill:.2%}") for choice in found.buckets],
    )
    notes = [
        "An estimate by formula (Korthikanti et al. 2022, arXiv 2205.05198, table 2; Megatron-LM's theoretical_memory_usage.py), with "
        "SwiGLU and grouped queries counted; nothing was measured. Fragmentation, buffers of exchanges and UserBuffers, attention's "
        "workspaces and FP8 copies of the weights are in the margin only. Before a long run try a few steps at the proposed B, which is "
        "also the largest T.",
    ]
    return [TableOf(rows=proposal), TableOf(title="Memory of the fullest rank", rows=fixed, notes=notes), budgets, buckets]
