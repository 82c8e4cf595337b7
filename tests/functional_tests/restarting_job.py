# SPDX-License-Identifier: Apache-2.0
"""`pretrain_gpt_thd.py` that kills one of its ranks in each of its first attempts; run below `torchrun --max-restarts`.

    torchrun ... restarting_job.py '[[1, 3, 0.05], [0, 2, 0.4]]' --data-path ...

The list has one entry an attempt: rank, iterations it makes before, seconds after their end. What is left of the attempts runs to the end.
With RSS_FOLDER in the environment each rank appends "iteration resident-MiB" every 50 iterations.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from megatron_dyn.training.launch import main
from megatron_dyn.training.loop import Trainer

RSS_INTERVAL = 50


def kill_self_after(iterations: int, delay: float) -> None:
    iterate, made = Trainer._iterate, [0]

    def counted(trainer, stop):
        stopped = iterate(trainer, stop)
        made[0] += 1
        if made[0] == iterations:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return stopped

    Trainer._iterate = counted


def record_memory(folder: Path, rank: str) -> None:
    iterate = Trainer._iterate

    def measured(trainer, stop):
        stopped = iterate(trainer, stop)
        if trainer.iteration % RSS_INTERVAL == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            with open(folder / f"rss_{rank}_{os.environ['TORCHELASTIC_RESTART_COUNT']}.txt", "a") as file:
                file.write(f"{trainer.iteration} {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.2f}\n")
        return stopped

    Trainer._iterate = measured


if __name__ == "__main__":
    kills, attempt = json.loads(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if "RSS_FOLDER" in os.environ:
        record_memory(Path(os.environ["RSS_FOLDER"]), os.environ["RANK"])
    if attempt < len(kills) and str(kills[attempt][0]) == os.environ["RANK"]:
        kill_self_after(*kills[attempt][1:])
    status = main(sys.argv[2:])
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
