# SPDX-License-Identifier: Apache-2.0
"""Every overlap method against fp32, T changing at random under skew, in bf16 and FP8.

    bash tests/gpu/one_card.sh 2 tests/gpu/overlap_values.py --steps 500          # side by side
    TURNS=1 bash tests/gpu/one_card.sh 2 tests/gpu/overlap_values.py --steps 500  # taking turns
    torchrun --nproc-per-node 4 tests/gpu/overlap_values.py --steps 500           # a card for each rank

Each step runs column and row layer forward and backward with another T, ranks delayed at random. All steps are compared with an fp32
reference, some also with the same layers without overlap; some are run twice and compared bit for bit. Exit status 1 when an error is
above the level of the run without overlap, when something does not repeat that repeats without overlap, or when a buffer moved.
"""

import argparse
import random

import stand
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch.module import base as te_base

from megatron_dyn import userbuffers as ub
from megatron_dyn.planning.alignment import FP8_ROWS

RING = {"method": "ring_exchange"}
VARIANTS = {
    "ring AG, pipeline RS, bulk": ({}, {}),
    "ring AG, ring RS, bulk": ({"fc2_fprop": RING, "proj_fprop": RING}, {}),
    "dgrad + pipeline RS": ({n: {"method": "pipeline", "num_splits": 4} for n in ("fc1_dgrad", "qkv_dgrad")}, {"tp_comm_overlap_rs_dgrad": True}),
    "dgrad + ring RS": ({n: RING for n in ("fc1_dgrad", "qkv_dgrad")}, {"tp_comm_overlap_rs_dgrad": True}),
}
NAMES = ("y", "dx", "dw1", "dw2")
ROOM = 1.3  # how much larger an error may be than the same without overlap: both are rounding, added up in another order


PIPELINED_DGRAD = "dgrad + pipeline RS"  # FP8 only: see `stock_pipelined_dgrad`


def run(tp: int, precision: str, variant: str, *, steps: int, hidden: int, capacity: int) -> bool:
    recipe, (table, flags) = stand.RECIPES[precision], VARIANTS[variant]
    unit = tp * (FP8_ROWS if recipe else 1)
    manager = ub.initialize_ub(
        [capacity, hidden], tp, quantization_modes=["fp8" if recipe else "none"], ub_cfgs=table, bootstrap_backend=dist.get_backend(), backend="te"
    )
    places = {key: c.native.get_buffer(False).data_ptr() for key, c in manager.communicators.items()}
    mlp = stand.Mlp(stand.settings(tp, hidden, 4 * hidden, overlap=True, **flags))
    plain = stand.Mlp(stand.settings(tp, hidden, 4 * hidden, overlap=False))
    together, generator = random.Random(steps), torch.Generator(device="cuda").manual_seed(7)
    pause = stand.pauses(1)
    lengths = [unit, capacity] + [unit * round((capacity // unit) ** together.random()) for _ in range(steps - 2)]
    found, compared, repeats = [], [], {"overlap": [], "plain": []}
    # With delayed scaling a step has the scales of the one before: the same input repeats only after it has seen itself.
    every, settling = max(steps // 20, 1), 4 if precision == "fp8 delayed" else 1
    for step, T in enumerate(lengths):
        x, g = stand.data(generator, T, hidden), stand.data(generator, T, hidden)
        wanted = mlp.reference(x, g)
        looked_at = step % every == 0
        for _ in range(settling if looked_at else 1):
            got = mlp.step(x, g, recipe, pause)
        found.append(stand.errors(got, wanted))
        if looked_at:
            again = mlp.step(x, g, recipe, pause)
            repeats["overlap"].append(torch.stack([(a == b).all() for a, b in zip(got, again)]))
            for _ in range(settling):
                bare = plain.step(x, g, recipe)
            compared.append((step, stand.errors(bare, wanted)))
            repeats["plain"].append(torch.stack([(a == b).all() for a, b in zip(bare, plain.step(x, g, recipe))]))
    torch.cuda.synchronize()
    found, bare = torch.stack(found).cpu(), torch.stack([e for _, e in compared]).cpu()
    there = torch.tensor([step for step, _ in compared])
    same = {name: torch.stack(values).float().mean(0).cpu() for name, values in repeats.items()}
    still = all(c.native.get_buffer(False).data_ptr() == places[key] for key, c in manager.communicators.items())
    level = bool((found.max(0).values <= ROOM * bare.max(0).values).all()) and bool(torch.isfinite(found).all())
    there_too = bool((found[there] <= ROOM * bare + 1e-3).all())
    repeatable = bool((same["overlap"] >= same["plain"]).all())
    good = stand.everywhere(level and there_too and repeatable and still)
    worst = lambda values: " ".join(f"{name} {value:.1e}" for name, value in zip(NAMES, values.max(0).values))  # noqa: E731
    stand.say(
        f"{precision:12s} {variant:28s} T {min(lengths)}..{max(lengths)}, {len(set(lengths))} different | overlap {worst(found)} | without {worst(bare)} "
        f"| repeats {[round(v, 2) for v in same['overlap'].tolist()]} without {[round(v, 2) for v in same['plain'].tolist()]} "
        f"| fences {manager.fences} | {'ok' if good else f'WRONG (level {level}, {there_too}, repeats {repeatable}, addresses {still})'}"
    )
    ub.destroy_ub()
    return good


def stock_pipelined_dgrad(tp: int, hidden: int = 256, tokens: int = 256) -> None:
    """Unmodified Transformer Engine at its registered size, bf16: why `initialize_ub` refuses this method for bf16."""
    mode = te_base.UserBufferQuantizationMode.NONE
    table = {n: {"method": "pipeline", "num_splits": 4} for n in ("fc1_dgrad", "qkv_dgrad")}
    te_base.initialize_ub([tokens, hidden], tp, quantization_modes=[mode], dtype=torch.bfloat16, ub_cfgs=table, bootstrap_backend=dist.get_backend())
    mlp = stand.Mlp(stand.settings(tp, hidden, 4 * hidden, overlap=True, tp_comm_overlap_rs_dgrad=True), ours=False)
    generator = torch.Generator(device="cuda").manual_seed(3)
    x, g = stand.data(generator, tokens, hidden), stand.data(generator, tokens, hidden)
    found = stand.errors(mlp.step(x, g), mlp.reference(x, g)).tolist()
    stand.say("stock Transformer Engine, bf16, dgrad + pipeline RS, T = capacity:", " ".join(f"{n} {e:.1e}" for n, e in zip(NAMES, found)))
    dist.barrier()
    te_base.destroy_ub()
    try:
        ub.initialize_ub([tokens, hidden], tp, ub_cfgs=table, backend="te")
        raise SystemExit("the method was not refused")
    except ub.OverlapConfigError:
        pass


def small_capacity(tp: int) -> bool:
    """Capacity 16, T = 16, 8, 12, 16, 8: a smaller T sees nothing of the larger one before it; T = 20 is refused on every rank."""
    hidden = 256
    manager = ub.initialize_ub([16, hidden], tp, bootstrap_backend=dist.get_backend(), backend="te")
    mlp = stand.Mlp(stand.settings(tp, hidden, 4 * hidden, overlap=True))
    generator, good, firsts = torch.Generator(device="cuda").manual_seed(3), True, {}
    inputs = {T: (stand.data(generator, T, hidden), stand.data(generator, T, hidden)) for T in (16, 8, 12)}
    for T in (16, 8, 12, 16, 8):
        got = mlp.step(*inputs[T])
        good &= [tuple(got[0].shape), tuple(got[1].shape)] == [(T // tp, hidden)] * 2
        good &= bool((stand.errors(got, mlp.reference(*inputs[T])) < 1.2e-2).all())
        good &= all(torch.equal(a, b) for a, b in zip(got, firsts.setdefault(T, got)))
    try:
        mlp.step(stand.data(generator, 20, hidden), stand.data(generator, 20, hidden))
        good = False
    except ub.ActiveShapeError:
        good &= manager.active_shape == [8, hidden]
    good &= all(torch.equal(a, b) for a, b in zip(mlp.step(*inputs[8]), firsts[8]))
    good = stand.everywhere(good)
    ub.destroy_ub()
    stand.say(f"capacity 16, T 16 8 12 16 8, and 20 refused: {'ok' if good else 'WRONG'}")
    return good


def adopted(tp: int, hidden: int = 256, tokens: int = 128) -> bool:
    """Communicators that somebody made with `te.initialize_ub` take the active shape too, and go back at their capacity."""
    mode = te_base.UserBufferQuantizationMode.NONE
    te_base.initialize_ub([tokens, hidden], tp, quantization_modes=[mode], dtype=torch.bfloat16, bootstrap_backend=dist.get_backend())
    theirs = dict(te_base._ub_communicators)
    try:
        ub.initialize_ub([2 * tokens, hidden], tp, backend="te")
        good = False
    except ub.ActiveShapeError:  # smaller than asked for
        good = True
    manager = ub.initialize_ub([tokens // 2, hidden], tp, backend="te")
    good &= manager.capacity == (tokens, hidden)
    mlp, generator = stand.Mlp(stand.settings(tp, hidden, 4 * hidden, overlap=True)), torch.Generator(device="cuda").manual_seed(3)
    for T in (tokens, 2 * tp, tokens // 4):
        x, g = stand.data(generator, T, hidden), stand.data(generator, T, hidden)
        good &= bool((stand.errors(mlp.step(x, g), mlp.reference(x, g)) < 1.2e-2).all())
    ub.set_ub_active_shape([tokens // 2, hidden])  # from outside: fenced, by an all-reduce here
    good &= manager.fences == 1
    ub.destroy_ub()
    good &= te_base._ub_communicators == theirs and all(c.get_buffer(True).size(0) == tokens // tp for c in theirs.values())
    good = stand.everywhere(good)
    te_base.destroy_ub()
    stand.say(f"adopted communicators: {'ok' if good else 'WRONG'}")
    return good


def interleaved(tp: int, hidden: int = 512, capacity: int = 1024, steps: int = 60) -> bool:
    """The order of 1F1B, F1 F2 B1 F3 B2 ..., each with its own T, with and without recomputation, and a forward without gradient in
    between: to the bit what each microbatch gives alone. Without the hook before the backward it must not work (the mutant)."""
    ub.initialize_ub([capacity, hidden], tp, bootstrap_backend=dist.get_backend(), backend="te")
    mlp, generator, together = (
        stand.Mlp(stand.settings(tp, hidden, 4 * hidden, overlap=True)),
        torch.Generator(device="cuda").manual_seed(5),
        random.Random(2),
    )
    pause, good, waiting = stand.pauses(9), True, []
    weights = (mlp.fc1.weight, mlp.fc2.weight)

    def forward(T: int):
        x, g = stand.data(generator, T, hidden), stand.data(generator, T, hidden)
        alone = mlp.step(x, g)
        local = x.chunk(tp, 0)[mlp.rank].clone().unsqueeze(1).requires_grad_()
        pause()
        recompute = together.random() < 0.4
        y = checkpoint(mlp.forward, local, use_reentrant=True) if recompute else mlp.forward(local)
        return alone, local, y, g.chunk(tp, 0)[mlp.rank].unsqueeze(1).contiguous()

    def backward(alone, x, y, g) -> bool:
        for weight in weights:
            weight.grad = None
        pause()
        y.backward(g)
        return all(torch.equal(a, b) for a, b in zip(alone, [y.detach().squeeze(1), x.grad.squeeze(1), *(w.grad for w in weights)]))

    for _ in range(steps):
        waiting.append(forward(tp * together.randint(1, capacity // tp)))
        if together.random() < 0.3:
            with torch.no_grad():
                mlp.forward(stand.data(generator, 4, hidden).unsqueeze(1))
        if len(waiting) > 1:
            good &= backward(*waiting.pop(0))
    good &= backward(*waiting.pop(0))
    good = stand.everywhere(good)
    first, _ = forward(64), forward(32)
    begin, manager = type(ub.current()).begin, ub.current()
    manager.begin = lambda used, rows: None  # the mutant: no shape before the backward
    try:
        caught = not backward(*first)
    except RuntimeError:
        caught = True
    manager.begin = begin.__get__(manager)
    caught = stand.everywhere(caught)
    torch.cuda.synchronize()
    dist.barrier()
    ub.destroy_ub()
    stand.say(f"1F1B order, recomputation, no-grad forwards, {steps} microbatches: {'ok' if good else 'WRONG'}; mutant {'caught' if caught else 'MISSED'}")
    return good and caught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--precision", choices=stand.RECIPES, nargs="+", default=list(stand.RECIPES))
    arguments = parser.parse_args()
    _, tp = stand.start()
    stock_pipelined_dgrad(tp)
    good = small_capacity(tp) & adopted(tp) & interleaved(tp)
    for precision in arguments.precision:
        for variant in (v for v in VARIANTS if precision != "bf16" or v != PIPELINED_DGRAD):
            good &= run(tp, precision, variant, steps=arguments.steps, hidden=arguments.hidden, capacity=arguments.capacity)
    stand.say("all right" if good else "SOMETHING IS WRONG")
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
