# SPDX-License-Identifier: Apache-2.0
"""A comparison as a page: in the first screen what was compared, whether it holds, and how much faster it was."""

import html
from collections.abc import Sequence
from pathlib import Path

from megatron_dyn.compare import pictures
from megatron_dyn.compare.arms import Arm, differing_settings, other_training
from megatron_dyn.compare.verdicts import Verdict
from megatron_dyn.figures import write_whole
from megatron_dyn.training.metrics_file import write_json
from megatron_dyn.web_page import page, table, write_pictures

HOLDS = {True: "holds", False: "FAILS", None: "reported"}
CLASSES = {True: "good", False: "bad", None: "open"}


def number(value: float | int | str | None) -> str:
    """A value of a verdict as text."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def headline(arms: Sequence[Arm], verdicts: Sequence[Verdict]) -> list[tuple[str, bool | None]]:
    """What was compared, whether it holds, how much faster: a sentence an arm, and whether it holds."""
    reference, told = arms[0], []
    for arm in arms[1:]:
        own = [verdict for verdict in verdicts if verdict.arm == arm.name or verdict.arm.startswith(f"{arm.name}, seed")]
        failed = [verdict for verdict in own if verdict.holds is False]
        judged = sum(verdict.holds is not None for verdict in own)
        speed = next((verdict.value for verdict in own if verdict.name == "real tokens a second"), None)
        faster = f"{speed:.2f} times its real tokens a second" if speed else "speed unknown"
        if failed:
            text = f"{arm.name} does not train as {reference.name} does: {', '.join(sorted({verdict.name for verdict in failed}))} failed"
        else:
            text = f"{arm.name} trains as {reference.name} does ({judged} of {judged} checks hold)"
        ranks = {next(iter(of.runs.values())).ranks for of in (reference, arm)}
        if len(ranks) > 1:
            faster += f" (on {next(iter(arm.runs.values())).ranks} ranks against {next(iter(reference.runs.values())).ranks})"
        other = other_training(reference, arm)
        beside = f" They also differ in {', '.join(other)}, which changes what is learnt." if other else ""
        told.append((f"{text}; {faster}.{beside}", not failed))
    return told


def summary_rows(arms: Sequence[Arm]) -> list[tuple[str, ...]]:
    """Arm, seeds, steps, real tokens, share of real tokens in rows, real tokens a second, final loss."""
    rows, common = [], common_steps(arms)
    for arm in arms:
        runs = list(arm.runs.values())
        tokens, slots = sum(int(run.tokens.sum()) for run in runs), sum(int(run.slots.sum()) for run in runs)
        speed = sorted(run.rate(run.tokens) for run in runs)[len(runs) // 2]
        finals = [pictures.final_loss(run, common) for run in runs]
        rows.append(
            (
                arm.name, ", ".join(map(str, arm.runs)), f"{min(len(run.loss) for run in runs)}", f"{tokens:,}", f"{tokens / slots:.1%}", f"{speed:,.0f}",
                f"{sum(finals) / len(finals):.4f}",
            )
        )  # fmt: skip
    return rows


def common_steps(arms: Sequence[Arm]) -> int:
    """Steps that every run has: final losses are of these."""
    return min(len(run.loss) for arm in arms for run in arm.runs.values())


SUMMARY_COLUMNS = ("arm", "seeds", "steps", "real tokens", "real / rows", "real tokens/s", "final loss")


def write_report(folder: Path, arms: Sequence[Arm], verdicts: Sequence[Verdict]) -> list[Path]:
    """Writes compare.html, its pictures, and compare.json.

    Args:
        folder: made if it is not there; files of the same names are replaced.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "losses": ("Loss over real tokens and over wall time", pictures.draw_losses(arms)),
        "differences": (f"Difference of each step's loss from {arms[0].name}", pictures.draw_differences(arms)),
        "speed": ("Throughput", pictures.draw_speed(arms)),
        "shapes": ("T of the microbatches, and the share of real tokens", pictures.draw_shapes(arms)),
    }
    written, figures = write_pictures(folder, drawn)
    told = headline(arms, verdicts)
    rows = [(HOLDS[v.holds], v.name, v.arm, number(v.value), number(v.threshold), v.text) for v in verdicts]
    about = arms[0].runs[next(iter(arms[0].runs))].about
    body = [
        f"<h1>{html.escape(' against '.join([', '.join(arm.name for arm in arms[1:]), arms[0].name]))}</h1>",
        *(f'<p class="headline {CLASSES[holds]}">{html.escape(text)}</p>' for text, holds in told),
        f'<p class="note">{html.escape(_what(about))}</p>',
        table(SUMMARY_COLUMNS, summary_rows(arms)),
        *figures,
        "<h2>Checks</h2>",
        table(("", "check", "arm", "value", "limit", "what"), rows, classes=[CLASSES[v.holds] for v in verdicts], kind="texts"),
        "<h2>Settings that differ</h2>",
        table(("setting", *(arm.name for arm in arms)), differing_settings(arms), kind="texts"),
    ]
    write_whole(folder / "compare.html", page(f"{', '.join(arm.name for arm in arms)}", body))
    write_json(folder / "compare.json", as_json(arms, verdicts))
    return [folder / "compare.html", *written, folder / "compare.json"]


def as_json(arms: Sequence[Arm], verdicts: Sequence[Verdict]) -> dict:
    """Everything as plain values."""
    common = common_steps(arms)
    return {
        "holds": all(verdict.holds is not False for verdict in verdicts),
        "headline": [text for text, _ in headline(arms, verdicts)],
        "arms": [
            {
                "name": arm.name,
                "runs": {str(seed): run.name for seed, run in arm.runs.items()},
                "steps": {str(seed): len(run.loss) for seed, run in arm.runs.items()},
                "tokens": sum(int(run.tokens.sum()) for run in arm.runs.values()),
                "rows": sum(int(run.slots.sum()) for run in arm.runs.values()),
                "tokens_per_second": {str(seed): run.rate(run.tokens) for seed, run in arm.runs.items()},
                "final_loss": {str(seed): pictures.final_loss(run, common) for seed, run in arm.runs.items()},
            }
            for arm in arms
        ],
        "differing_settings": {name: values for name, *values in differing_settings(arms)},
        "verdicts": [verdict.as_dict() for verdict in verdicts],
    }


def _what(about: dict) -> str:
    settings = about["settings"]
    model, data = settings["model"], settings["data"]
    return (
        f"{about.get('parameters', 0):,} parameters ({model['num_layers']} layers, hidden {model['hidden_size']}), at most {data['max_tokens_per_microbatch']} tokens a "
        f"microbatch, {', '.join(f'{name} {size}' for name, size in about['parallel'].items() if size > 1) or 'one rank'}, on {about.get('device', 'an unknown device')}."
    )
