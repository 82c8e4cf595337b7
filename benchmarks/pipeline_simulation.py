# SPDX-License-Identifier: Apache-2.0
"""Simulated step times: planned, filled in order, Karmarkar-Karp by token budget, padded to the maximum; Markdown tables and a picture.

    python benchmarks/pipeline_simulation.py [--documents-per-rank 128] [--picture docs/images/pipeline_simulation.png]

A step has as many tokens as `python -m megatron_dyn plan --recommend` proposes for the pipeline and the budget: 96% of m microbatches a
rank, m being at least 4 and so many that the pipeline idles for 10% of the time at most (a multiple of PP where it is interleaved). With
--documents-per-rank it has that many documents instead, whatever the pipeline. All ways to divide a step get the same documents. Times
are sums over the steps, as multiples of the planned way's, so a ratio above 1 is how many times the step rate of that way the planned
one has. The second distribution is drawn, with replacement, from the documents of an index (--idx); without that file it is left out.
Karmarkar-Karp is left out where it takes too long (--most-differencing).
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dyn.corpus import IndexedReader
from megatron_dyn.figures import BLUE, GREEN, GREY, ORANGE, as_png, new_figure, tidy, write_whole
from megatron_dyn.pipeline.schedule import microbatch_multiple
from megatron_dyn.planning import CostModel, PlanConfig, Planner
from megatron_dyn.planning.baselines import DIVISIONS, differencing_work
from megatron_dyn.planning.division import division_of, pieces_in_order
from megatron_dyn.planning.simulate import step_time
from megatron_dyn.training.config import ParallelConfig
from megatron_dyn.training.recommend import least_microbatches, step_tokens

SHARED_INDEX = Path(__file__).resolve().parents[2] / "shared/data/megatron/mix_heavytail_mistral_v1"
PIPELINES = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4)]
MANY_MICROBATCHES = 512
WAYS = {"in_order": "in order", "karmarkar_karp": "KK", "padded": "padded"}


@dataclass(frozen=True)
class Setting:
    """What a step is divided under."""

    budget: int
    ranks: int
    multiple: int
    batch: tuple[tuple[str, int], ...]
    """global_batch_size or global_batch_tokens."""


def lengths_of(name: str, count: int, index: Path) -> np.ndarray:
    """Document lengths, int64 [count]."""
    random = np.random.default_rng(0)
    if name == "lognormal":
        return np.clip(random.lognormal(6.0, 1.2, count), 1, None).astype(np.int64)
    found = np.asarray(IndexedReader(str(index)).lengths)
    return random.choice(found[found > 0], count)


def costs(lengths: np.ndarray, setting: Setting, steps: int, cost: CostModel, most_differencing: int) -> dict[str, list[np.ndarray]]:
    """Costs of the microbatches [ranks, K] of each step, by way; under "over" the microbatches above the budget and all of them (KK)."""
    config = PlanConfig(
        max_tokens_per_microbatch=setting.budget, data_parallel_size=setting.ranks, alignment=2, microbatch_multiple=setting.multiple,
        cost=cost, **dict(setting.batch),
    )  # fmt: skip
    planner, longest = Planner(lengths, config), int(lengths.max())
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("planned", *WAYS)}
    over = np.zeros(2)
    for step in range(steps):
        plan = planner.plan(step)
        found["planned"].append(division_of(plan, cost).cost)
        pieces = pieces_in_order(plan)
        for name in WAYS:
            if name == "karmarkar_karp" and steps * differencing_work(pieces, config) > most_differencing:
                continue
            division = DIVISIONS[name](pieces, config, longest)
            found[name].append(division.cost)
            if name == "karmarkar_karp":
                over += np.count_nonzero(division.tokens > setting.budget), np.count_nonzero(division.used)
    return found | {"over": [over]}


def batch_of(pipeline: tuple[int, int], budget: int, ranks: int, documents_per_rank: int | None) -> tuple[str, int]:
    """Name and size of the planner's global batch."""
    if documents_per_rank is not None:
        return ("global_batch_size", ranks * documents_per_rank)
    pp, vpp = pipeline
    parallel = ParallelConfig(pipeline_model_parallel_size=pp, num_virtual_stages_per_pipeline_rank=vpp if vpp > 1 else None)
    return ("global_batch_tokens", step_tokens(budget, microbatches=least_microbatches(parallel), data_parallel_size=ranks))


def time_of(way: str, table: np.ndarray, pp: int, vpp: int) -> float:
    """Of a step. Padded microbatches all cost the same and are thousands: for them the closed form, which the simulation gives for such."""
    if way == "padded" and table.shape[1] > MANY_MICROBATCHES:
        return float((table.sum(axis=1) / pp + table.max(axis=1) * (pp - 1) / (pp * vpp)).max())
    return step_time(table, pipeline_parallel=pp, virtual_stages=vpp)


def simulate(name: str, budget: int, ranks: int, pipelines: list[tuple[int, int]], arguments: argparse.Namespace) -> Iterator[dict]:
    """Times of all ways as multiples of the planned one's, for each pipeline."""
    cost = CostModel(linear=1.0, quadratic=arguments.quadratic)
    mean = lengths_of(name, 1 << 16, arguments.idx).mean()
    divided: dict[Setting, dict] = {}
    for pp, vpp in pipelines:
        batch = batch_of((pp, vpp), budget, ranks, arguments.documents_per_rank)
        documents = batch[1] if batch[0] == "global_batch_size" else int(batch[1] / mean)
        steps = max(2, arguments.documents // documents)
        setting = Setting(budget, ranks, microbatch_multiple(pp, vpp if vpp > 1 else None), (batch,))
        if setting not in divided:
            drawn = lengths_of(name, documents * (steps + 1), arguments.idx)  # one step more: those in tokens do not end with the epoch
            divided[setting] = costs(drawn, setting, steps, cost, arguments.most_differencing)
        found = divided[setting]
        total = {way: sum(time_of(way, table, pp, vpp) for table in found[way]) for way in ("planned", *WAYS)}
        over, used = found["over"][0]
        row = {way: total[way] / total["planned"] if found[way] else None for way in WAYS}
        even = sum(step_time(np.full((1, table.shape[1]), table.mean()), pipeline_parallel=pp, virtual_stages=vpp) for table in found["planned"])
        row |= {"even": even / total["planned"], "over": over / max(used, 1)}  # even: all microbatches of a step cost the same
        row |= {f"K of {way}": float(np.mean([table.shape[1] for table in found[way]])) for way in ("planned", *WAYS) if found[way]}
        yield {"cell": [name, budget, ranks, pp, vpp], "documents_per_rank": arguments.documents_per_rank, "steps": steps, **row}


def known_rows(arguments: argparse.Namespace) -> dict[tuple, dict]:
    """Cells of the results files that were made with this kind of batch."""
    rows = [json.loads(line) for path in arguments.results if path.exists() for line in path.read_text().splitlines()]
    return {tuple(row["cell"]): row for row in rows if row["documents_per_rank"] == arguments.documents_per_rank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents-per-rank", type=int, help="of a step, instead of the tokens that --recommend proposes")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--documents", type=int, default=65536, help="of all steps of a setting together, two steps at least")
    parser.add_argument("--idx", type=Path, default=SHARED_INDEX, help="prefix of the index whose lengths are the second distribution")
    parser.add_argument(
        "--quadratic", type=float, default=CostModel().quadratic, help="cost of attention per token pair, against 1 per token"
    )
    parser.add_argument("--most-differencing", type=int, default=30_000_000, help="parts that Karmarkar-Karp may join for a cell: a minute or two")
    parser.add_argument("--names", nargs="+", choices=["lognormal", "mix_heavytail"], default=["lognormal", "mix_heavytail"])
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[], help="files of cells: what they hold is not simulated again; new cells go to the first"
    )
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    names = arguments.names if arguments.idx.with_suffix(".idx").exists() else ["lognormal"]
    ratios = known_rows(arguments)
    for name, budget in itertools.product(names, arguments.budgets):
        for ranks in arguments.ranks:
            unknown = [pipeline for pipeline in PIPELINES if (name, budget, ranks, *pipeline) not in ratios]
            for row in simulate(name, budget, ranks, unknown, arguments):
                ratios[tuple(row["cell"])] = row
                if arguments.results:
                    with arguments.results[0].open("a") as stream:
                        stream.write(json.dumps(row) + "\n")
        print_table(name, budget, arguments.ranks, ratios)
    if arguments.picture:
        draw(names, arguments, ratios)


def cell(row: dict) -> str:
    """in order / KK / padded; share of KK's microbatches above B."""
    left_out = row["karmarkar_karp"] is None
    differencing = "-" if left_out else f"{row['karmarkar_karp']:.3f}"
    return f"{row['in_order']:.3f} / {differencing} / {row['padded']:.1f}" + ("" if left_out else f"; {row['over']:.0%}")


def print_table(name: str, budget: int, ranks: list[int], ratios: dict) -> None:
    print(f"\n{name}, B = {budget:,}: {' / '.join(WAYS.values())}, and Karmarkar-Karp's share of microbatches above B\n")
    print(f"| PP x VPP | K | {' | '.join(f'DP {count}' for count in ranks)} |\n|{'---|' * (len(ranks) + 2)}")
    for pp, vpp in PIPELINES:
        found = [ratios[name, budget, count, pp, vpp] for count in ranks]
        cells = [cell(row) for row in found]
        fewest, most = (f"{choose(row['K of planned'] for row in found):.1f}" for choose in (min, max))
        print(f"| {pp} x {vpp} | {fewest if fewest == most else f'{fewest}-{most}'} | {' | '.join(cells)} |", flush=True)


def draw(names: list[str], arguments: argparse.Namespace, ratios: dict) -> None:
    """Step rate of the planned way over in-order filling and Karmarkar-Karp; padding is off the scale and left to the tables."""
    figure = new_figure(11.0, 3.6 * len(names))
    panels = figure.subplots(len(names), len(arguments.budgets), sharey=True, squeeze=False)
    places = np.arange(len(PIPELINES))
    for row, name in enumerate(names):
        for column, budget in enumerate(arguments.budgets):
            axes = panels[row, column]
            tidy(axes)
            for way, colour, title in (
                ("in_order", ORANGE, "filled in order"),
                ("karmarkar_karp", BLUE, "Karmarkar-Karp (may exceed B)"),
            ):
                for count, style in zip(arguments.ranks, ("-", "--", ":")):
                    values = [ratios[name, budget, count, *pipeline][way] or np.nan for pipeline in PIPELINES]
                    axes.plot(places, values, style, color=colour, marker="o", markersize=3.5, linewidth=1.5, label=f"{title}, DP {count}")
            axes.axhline(1.0, color=GREEN, linewidth=1.4, label="planned")
            axes.set_xticks(places, [f"{pp}x{vpp}" for pp, vpp in PIPELINES])
            axes.set_title(f"{name}, B = {budget:,}", loc="left", fontsize=11)
            axes.spines["left"].set_color(GREY)
            if row == len(names) - 1:
                axes.set_xlabel("PP x VPP")
        panels[row, 0].set_ylabel("step time / planned")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, ncols=4, loc="outside lower center")
    write_whole(arguments.picture, as_png(figure))


if __name__ == "__main__":
    main()
