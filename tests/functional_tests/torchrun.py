# SPDX-License-Identifier: Apache-2.0
"""A job below the real torchrun, with restarts, that leaves no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(world: int, arguments: list[str], *, restarts: int, folder: Path, timeout: float) -> str:
    """Run to the end; returns the output. No process is left behind, however it ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout)
        finally:
            for group in ranks_of(process.pid) | {process.pid}:  # torchrun gives each rank a session of its own
                try:
                    os.killpg(group, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
        output.seek(0)
        said = output.read()
    assert status == 0, said[-4000:]
    return said


def ranks_of(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return set()
