# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a profiled step are, how busy they keep the device, and how far that is from two floors; a picture of it.

    python benchmarks/step_picture.py runs/profile --output docs/images/step_profile.png

Reads profile.json and trace.json.gz of step_profile.py. No GPU needed. The profiler slows the host, so gaps are larger than without it:
the share of time in which the device is busy is given for the steps that were timed without the profiler (kernel time of the traced
steps a token, times their tokens, over their time).

    arithmetic floor    operations of the real tokens (attention by squared lengths) over the rate of a large bf16 product
    memory floor        bytes that must move: for each microbatch weights twice and fp32 gradients read and written, once a step the
                        optimizer's state, over the rate of a large copy. Activations would come on top
"""

import argparse
import collections
import gzip
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

CATEGORIES = {  # the first pattern that is found decides
    "attention": r"sdpa|fmha|flash|compute_dot_do_o|convert_dq",
    "matrix products": r"nvjet|gemm|cutlass|cublas",
    "rotary embedding": r"rope",
    "norms": r"rmsnorm|layernorm|normalization",
    "SwiGLU": r"gated|swiglu|silu",
    "optimizer": r"multi_tensor|adam",
    "copies and fills": r"memcpy|memset|copy|fill",
    "exchanges": r"nccl|userbuffers",
}
OTHER = "element by element (loss, residuals, sums)"
COLOURS = dict(zip([*CATEGORIES, OTHER], ["#e15759", "#4e79a7", "#b07aa1", "#76b7b2", "#f28e2b", "#59a14f", "#bab0ac", "#9c755f", "#edc948"]))


def category_of(name: str) -> str:
    return next((category for category, pattern in CATEGORIES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def kernels(trace: Path) -> list[tuple[float, float, str]]:
    """(begin, end, name) in microseconds, sorted."""
    with gzip.open(trace) as stream:
        events = json.load(stream)["traceEvents"]
    on_device = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in on_device)


def busy(spans: list[tuple[float, float, str]]) -> float:
    total, reached = 0.0, 0.0
    for begin, end, _ in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="of step_profile.py")
    parser.add_argument("--output", type=Path, help="the picture (default: step.png in the folder)")
    own = parser.parse_args()
    profile = json.loads((own.folder / "profile.json").read_text())
    spans = kernels(own.folder / "trace.json.gz")
    if not spans:
        raise SystemExit(f"{own.folder}/trace.json.gz holds no kernel: it was made without a GPU")
    times: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    for begin, end, name in spans:
        times[category_of(name)] += (end - begin) / 1e6
        counts[category_of(name)] += 1
    traced = profile["traced_steps"]
    traced_tokens = sum(step["tokens"] for step in traced)
    device_seconds = busy(spans) / 1e6 / traced_tokens  # a token
    tokens, seconds = sum(step["tokens"] for step in profile["steps"]), sum(step["seconds"] for step in profile["steps"])
    microbatches = sum(len(step["T"]) for step in profile["steps"])
    arithmetic = sum(profile["operations"]) / profile["bf16_product_flops"]
    moved = profile["parameters"] * (microbatches * (2 * 2 + 2 * 4) + len(profile["steps"]) * (3 * 8 + 4 + 2))
    memory = moved / profile["copy_bytes_per_second"]
    print(f"{profile['device']}, {profile['parameters'] / 1e6:.0f}M parameters, {profile['settings']}")
    print(f"{tokens} tokens in {seconds:.3f} s: {tokens / seconds:.0f} a second, {seconds / microbatches * 1e3:.1f} ms a microbatch")
    print(f"device busy {device_seconds * tokens / seconds:.1%} of it (under the profiler {busy(spans) / (spans[-1][1] - spans[0][0]):.1%})")
    print(f"arithmetic floor {arithmetic:.3f} s ({arithmetic / seconds:.1%}: the MFU)")
    print(f"memory floor without activations {memory:.3f} s ({memory / seconds:.1%})")
    for name, value in times.most_common():
        print(f"  {value / sum(times.values()):6.1%} {value / traced_tokens * 1e9:8.1f} ns a token {counts[name]:6d} kernels  {name}")
    draw(profile, spans, times, own.output or own.folder / "step.png", arithmetic / tokens, device_seconds, seconds / tokens)


def draw(profile: dict, spans: list, times: collections.Counter, path: Path, floor: float, device: float, whole: float) -> None:
    """The last traced step; three microbatches of it; and a token's time as bars."""
    first = spans[0][0]
    figure, (all_of_it, some, bars) = plt.subplots(3, 1, figsize=(11, 6.4), height_ratios=[1, 1, 1.5], layout="constrained")
    end = spans[-1][1]
    middle = (first + end) / 2
    width = (end - first) / max(1, sum(len(step["T"]) for step in profile["traced_steps"])) * 2
    for axes, begin, until, title in (
        (all_of_it, first, end, "kernels of the traced steps"),
        (some, middle, middle + width, "about two microbatches of them"),
    ):
        by_colour = collections.defaultdict(list)
        for a, b, name in spans:
            if b > begin and a < until:
                by_colour[COLOURS[category_of(name)]].append(((a - begin) / 1e3, (b - a) / 1e3))
        for colour, ranges in by_colour.items():
            axes.broken_barh(ranges, (0, 1), color=colour, linewidth=0)
        axes.set(xlim=(0, (until - begin) / 1e3), ylim=(0, 1), yticks=[], xlabel="ms", title=title)
    total, left = sum(times.values()), 0.0
    for name, value in times.most_common():
        part = value / total * device * 1e9
        bars.barh(1, part, left=left, color=COLOURS[name])
        left += part
    bars.barh(2, whole * 1e9, color="#d9d9d9")
    bars.barh(0, floor * 1e9, color=COLOURS["matrix products"], alpha=0.5)
    bars.set_yticks([0, 1, 2], ["arithmetic floor", "kernels", "a step, without the profiler"])
    bars.set(xlabel="nanoseconds a real token")
    for row, value in ((0, floor), (1, device), (2, whole)):
        bars.text(value * 1e9, row, f" {value * 1e9:.0f}", va="center")
    bars.set_xlim(0, whole * 1e9 * 1.08)
    patches = [Patch(color=COLOURS[name], label=name) for name, _ in times.most_common()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
