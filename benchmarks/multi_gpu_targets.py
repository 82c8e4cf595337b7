# SPDX-License-Identifier: Apache-2.0
"""What the results of multi_gpu.sh say: each target met or not, and the T below which overlap loses. Without torch."""

import math
from collections.abc import Iterator

AGAINST_NO_OVERLAP = 1.05
"""Dynamic with overlap against the same without, at T of half the capacity and more."""
AGAINST_PADDED = 1.3
"""Dynamic with overlap against pad-to-max with overlap, real tokens a second of real documents."""
STOCK_ROOM = 0.01
"""A step at T = capacity may take so much longer than with stock layers."""
LOSSES_APART = 5e-3
"""Largest relative difference of a step's loss between topologies."""


def break_even(sweep: list[dict]) -> tuple[str, float | None]:
    """Where overlap stops to win, from the T of the sweep down.

    Args:
        sweep: Rows with `T` and `against_no_overlap` ([lower quartile, median, upper quartile] of the speed).

    Returns:
        "wins" (at every T), "loses" (already at the largest) or "breaks even"; and that T, between two measured ones in proportion on a
        logarithmic scale.
    """
    rows = sorted(((row["T"], row["against_no_overlap"][1]) for row in sweep if row["against_no_overlap"]), reverse=True)
    if not rows or rows[0][1] < 1:
        return "loses", None
    for (above, wins), (below, loses) in zip(rows, rows[1:]):
        if loses < 1:
            part = (wins - 1) / (wins - loses)
            return "breaks even", math.exp(math.log(above) + part * (math.log(below) - math.log(above)))
    return "wins", None


def targets(parts: dict[str, dict]) -> Iterator[dict]:
    """What was found beside what is wanted: {"target", "found", "wanted", "met"}; `met` is None where nothing is asked for.

    Args:
        parts: Results by the name of the part.
    """
    for name, part in parts.items():
        for precision, found in part.items():
            if isinstance(found, dict) and "sweep" in found:
                yield from _overlap(f"{name}, {precision}", found)
    losses = {name: part["losses"] for name, part in parts.items() if part.get("losses")}
    first, *others = losses or [None]
    for name in others:
        apart = max(abs(a / b - 1) for a, b in zip(losses[name], losses[first]))
        yield _row(f"{name} against {first}: losses apart", f"{apart:.1e}", f"<= {LOSSES_APART:.0e}", apart <= LOSSES_APART)


def _overlap(title: str, found: dict) -> Iterator[dict]:
    rows = [row for row in found["sweep"] if row["against_no_overlap"]]
    for row in rows:
        if row["share"] >= 0.5:
            speed = row["against_no_overlap"][1]
            yield _row(f"{title}: speed against no overlap, T {row['T']}", f"{speed:.3f}", f">= {AGAINST_NO_OVERLAP}", speed >= AGAINST_NO_OVERLAP)
        if row.get("against_stock"):
            time = row["against_stock"][1]
            yield _row(f"{title}: time against stock layers, T = capacity", f"{time:.4f}", f"<= {1 + STOCK_ROOM}", time <= 1 + STOCK_ROOM)
    if rows:
        how, where = break_even(rows)
        least, largest = min(row["T"] for row in rows), max(row["T"] for row in rows)
        words = {"wins": f"none down to {least}", "loses": f"{largest}, the largest", "breaks even": f"about {where or 0:.0f}"}[how]
        yield _row(f"{title}: T below which overlap loses", words, "stated", None)
    if found["documents"] and found["documents"]["against_padded"]:
        documents = found["documents"]
        if documents["against_no_overlap"]:
            yield _row(f"{title}: speed against no overlap, real documents", f"{documents['against_no_overlap'][1]:.3f}", "stated", None)
        speed = documents["against_padded"][1]
        yield _row(f"{title}: real tokens/s against pad-to-max with overlap", f"{speed:.2f}", f">= {AGAINST_PADDED}", speed >= AGAINST_PADDED)


def _row(target: str, found: str, wanted: str, met: bool | None) -> dict:
    return {"target": target, "found": found, "wanted": wanted, "met": met}


def lines(rows: list[dict]) -> list[str]:
    words = {True: "met", False: "NOT MET", None: ""}
    return [f"  {row['target']:<62}{row['found']:>20}   {row['wanted']:<9} {words[row['met']]}".rstrip() for row in rows]
