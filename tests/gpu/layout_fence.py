# SPDX-License-Identifier: Apache-2.0
"""Where a change of layout races, and that the fence ends it: three sequences of exchanges, under skew, with each fence policy.

    TURNS=1 bash tests/gpu/one_card.sh 2 tests/gpu/layout_fence.py     # taking turns: the skew that shows it

Counts wrong results of 200 forward calls. "change" never has the same T twice in a row; "same" is Transformer Engine's own use. Exit status 1
when a result is wrong that the policy has to prevent. (That "never" shows wrong ones is luck of the timing, so it is only printed.)
"""

import argparse
import random

import stand
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_dyn import userbuffers as ub

SEQUENCES = {"all-gather only": ("fc1",), "reduce-scatter only": ("fc2",), "in turn, as in a block": ("fc1", "fc2")}


def wrong(mlp: stand.Mlp, layers: tuple[str, ...], *, changing: bool, calls: int, capacity: int) -> int:
    tp, hidden, ffn = mlp.tp, mlp.w1.size(1), mlp.w1.size(0)
    together, pause = random.Random(7), stand.pauses(5, share=0.5, longest=4e6)
    generator = torch.Generator(device="cuda").manual_seed(0)
    choices, T, checks = [8 * tp, 256, 1024, capacity // 2, capacity], capacity // 2, []
    with torch.no_grad():
        for _ in range(calls):
            T = together.choice([c for c in choices if c != T]) if changing else capacity // 2
            # Everything is drawn before the pause, so that nothing but the exchanges orders the ranks.
            x, z = stand.data(generator, T, hidden), stand.data(generator, T, ffn)
            wanted = {
                "fc1": F.linear(x.float(), mlp.w1.chunk(tp, 0)[mlp.rank].float()),
                "fc2": F.linear(z.float(), mlp.w2.float()).chunk(tp, 0)[mlp.rank],
            }
            given = {"fc1": x.chunk(tp, 0)[mlp.rank], "fc2": z.chunk(tp, 1)[mlp.rank]}
            pause()
            for name in layers:
                y = getattr(mlp, name)(given[name].contiguous().unsqueeze(1))[0].squeeze(1)
                checks.append(stand.errors([y], [wanted[name]]))
    torch.cuda.synchronize()
    errors = torch.stack(checks).cpu()
    return int(((errors > 1e-2) | ~torch.isfinite(errors)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--capacity", type=int, default=4096)
    arguments = parser.parse_args()
    _, tp = stand.start()
    good = True
    stand.say(f"{'fence':8s}{'sequence':26s}{'T':8s}wrong results of {arguments.calls} calls, per rank (fences)")
    for policy in ("never", "auto", "always"):
        manager = ub.initialize_ub(
            [arguments.capacity, arguments.hidden], tp, bootstrap_backend=dist.get_backend(), backend="te", layout_fence=policy
        )
        mlp = stand.Mlp(stand.settings(tp, arguments.hidden, 4 * arguments.hidden, overlap=True), norm=False)
        for name, layers in SEQUENCES.items():
            for changing in (False, True):
                before = manager.fences
                counts = [None] * tp
                mine = wrong(mlp, layers, changing=changing, calls=arguments.calls, capacity=arguments.capacity)
                dist.all_gather_object(counts, mine)
                has_to_be_right = policy == "always" or (policy == "auto" and changing) or len(layers) == 2
                good &= not (has_to_be_right and any(counts))
                verdict = "" if not any(counts) else ("  WRONG" if has_to_be_right else "  (the race)")
                stand.say(f"{policy:8s}{name:26s}{'change' if changing else 'same':8s}{counts} ({manager.fences - before}){verdict}")
        dist.barrier()
        ub.destroy_ub()
    stand.say("all right" if good else "SOMETHING IS WRONG")
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
