# SPDX-License-Identifier: Apache-2.0
"""A comparison as a page: in the first screen what was compared, whether it holds, and how much faster it was."""

import datetime
import html
from collections.abc import Sequence
from pathlib import Path

from megatron_dyn.compare import pictures
from megatron_dyn.compare.arms import Arm, differing_settings
from megatron_dyn.compare.comparison import Comparison
from megatron_dyn.compare.pairs import final_loss, most_common_steps, window_of
from megatron_dyn.compare.runs import Run
from megatron_dyn.compare.verdicts import Verdict
from megatron_dyn.figures import write_whole
from megatron_dyn.training.metrics_file import METRICS_FILE, write_json
from megatron_dyn.web_page import page, table, write_pictures

CLASSES = {"holds": "good", "FAILS": "bad", "not decided": "undecided", "reported": "open"}
"""Of an outcome, on the page and on the terminal."""


def number(value: float | int | str | None) -> str:
    """A value of a verdict as text: three digits, six where it is nearly 1, as correlations and ratios are."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if 0.9 < abs(value) < 1.1 else f"{value:.3g}"


def check_rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Outcome, check, arm, value, limit, what."""
    return [(v.outcome, v.name, v.about, number(v.value), number(v.threshold), v.text) for v in verdicts]


def common_steps(arms: Sequence[Arm]) -> int:
    """Steps whose final loss is shown of every arm; a seed cut short beside others does not count."""
    return min(most_common_steps([len(run.loss) for run in arm.runs.values()]) for arm in arms)


def summary(found: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of what each arm was."""
    common, longest = common_steps(found.arms), max(len(run.loss) for arm in found.arms for run in arm.runs.values())
    loss = "final loss" if common == longest else f"loss, steps {common - window_of(common) + 1} to {common}"
    rows = []
    for arm in found.arms:
        runs = list(arm.runs.values())
        tokens, slots = sum(int(run.tokens.sum()) for run in runs), sum(int(run.slots.sum()) for run in runs)
        speed = sorted(run.rate(run.tokens) for run in runs)[len(runs) // 2]
        finals = [final_loss(run, common) for run in runs if len(run.loss) >= common]
        steps = sorted({len(run.loss) for run in runs})
        rows.append(
            (
                arm.name, ", ".join(map(str, arm.runs)), " to ".join(f"{count:,}" for count in dict.fromkeys((steps[0], steps[-1]))), f"{tokens:,}",
                f"{tokens / slots:.1%}", *([f"{speed:,.0f}"] if found.with_speed else []), f"{sum(finals) / len(finals):.4f}",
            )
        )  # fmt: skip
    return ("arm", "seeds", "steps", "real tokens", "real / rows", *(["real tokens/s"] if found.with_speed else []), loss), rows


def write_report(folder: Path, found: Comparison) -> list[Path]:
    """Writes compare.html, its pictures, and compare.json.

    Args:
        folder: made if it is not there; files of the same names are replaced.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arms, losses = found.arms, "Loss over real tokens" + (" and over wall time" if found.with_speed else "")
    drawn = {
        "losses": (losses, pictures.draw_losses(arms, with_time=found.with_speed)),
        "differences": pictures.draw_differences(found),
        "speed": ("Throughput", pictures.draw_speed(arms)) if found.with_speed else None,
        "shapes": ("T of the microbatches, and the share of real tokens", pictures.draw_shapes(arms)),
    }
    written, figures = write_pictures(folder, {name: shown for name, shown in drawn.items() if shown})
    if not found.with_speed:
        (folder / "speed.png").unlink(missing_ok=True)  # of an earlier report: it would be taken for this one's
    classes = {True: "good", False: "bad", None: "undecided"}
    columns, rows = summary(found)
    outcomes = [CLASSES[verdict.outcome] for verdict in found.verdicts]
    checks = table(("", "check", "arm", "value", "limit", "what"), check_rows(found.verdicts), classes=outcomes, kind="checks")
    body = [
        f"<h1>{html.escape(' against '.join([', '.join(arm.name for arm in arms[1:]), arms[0].name]))}</h1>",
        *(f'<p class="headline {classes[holds]}">{html.escape(text)}</p>' for text, holds in found.headline),
        *([f'<p class="headline">{html.escape(found.note)}</p>'] if found.note else []),
        f'<p class="note">{html.escape(_what(arms))}</p>',
        table(columns, rows),
        *figures,
        "<h2>Checks</h2>",
        checks,
        "<h2>Settings that differ</h2>",
        table(("setting", *(arm.name for arm in arms)), differing_settings(arms), kind="texts"),
    ]
    write_whole(folder / "compare.html", page(f"{', '.join(arm.name for arm in arms)}", body))
    write_json(folder / "compare.json", as_json(found))
    return [folder / "compare.html", *written, folder / "compare.json"]


def as_json(found: Comparison) -> dict:
    """Everything as plain values."""
    common = common_steps(found.arms)

    def of_arm(arm: Arm) -> dict:
        runs = {str(seed): run for seed, run in arm.runs.items()}
        told = {
            "name": arm.name,
            "runs": {seed: run.name for seed, run in runs.items()},
            "steps": {seed: len(run.loss) for seed, run in runs.items()},
            "tokens": sum(int(run.tokens.sum()) for run in runs.values()),
            "rows": sum(int(run.slots.sum()) for run in runs.values()),
            "final_loss": {seed: final_loss(run, common) if len(run.loss) >= common else None for seed, run in runs.items()},
        }
        if found.with_speed:
            told["tokens_per_second"] = {seed: run.rate(run.tokens) for seed, run in runs.items()}
        return told

    return {
        "holds": found.holds,
        "headline": [text for text, _ in found.headline],
        "note": found.note,
        "outcomes": {pairs.arm.name: holds for pairs, (_, holds) in zip(found.pairs, found.headline)},
        "arms": [of_arm(arm) for arm in found.arms],
        "differing_settings": {name: values for name, *values in differing_settings(found.arms)},
        "verdicts": [verdict.as_dict() for verdict in found.verdicts],
    }


def _what(arms: Sequence[Arm]) -> str:
    """Model, corpus, layout of ranks, device and date; what differs between arms, by arm."""
    runs = [next(iter(arm.runs.values())) for arm in arms]
    model, data = (runs[0].about["settings"][section] for section in ("model", "data"))
    parameters = runs[0].about.get("parameters")
    size = f"{parameters:,} parameters" if isinstance(parameters, int) else "a model"
    corpus = {_corpus(run): None for run in runs}
    budget = f"at most {data['max_tokens_per_microbatch']} tokens a microbatch, " if data.get("max_tokens_per_microbatch") else ""
    days = sorted({datetime.date.fromtimestamp((run.folder / METRICS_FILE).stat().st_mtime).isoformat() for arm in arms for run in arm.runs.values()})
    devices = {str(run.about.get("device", "an unknown device")): None for run in runs}
    return (
        f"{size} ({model.get('num_layers', '?')} layers, hidden {model.get('hidden_size', '?')}) on {'; '.join(corpus)}, {budget}"
        f"{_by_arm(arms, [_layout(run) for run in runs])}, on {'; '.join(devices)}. Recorded {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )


def _corpus(run: Run) -> str:
    paths = run.setting("data.data_path") or "an unnamed corpus"
    return ", ".join(map(str, paths)) if isinstance(paths, list) else str(paths)


def _layout(run: Run) -> str:
    sizes = run.about["parallel"]
    told = [f"{name} {size}" for name, size in sizes.items() if size > 1 and name != "SP"] + (["SP"] if sizes.get("SP") else [])
    return ", ".join(told) or "one rank"


def _by_arm(arms: Sequence[Arm], told: Sequence[str]) -> str:
    return told[0] if len(set(told)) == 1 else "; ".join(f"{arm.name}: {text}" for arm, text in zip(arms, told))
