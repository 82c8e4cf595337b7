# SPDX-License-Identifier: Apache-2.0
"""All arms x seeds of a comparison, one after the other, and the report on them.

    make demo                                                      # makes the documents used here
    python examples/convergence/run_convergence.py examples/convergence/cpu.yaml --output runs/convergence -- \\
        --data-path runs/demo/data/stdlib --tokenizer-model runs/demo/data/tokenizer.model

Start it again after an interruption: finished runs are kept, an unfinished one goes on from its last checkpoint. On GPUs give
a launcher: --launcher "torchrun --nproc-per-node 8". The YAML file names the settings of all runs, what each arm does
otherwise, the seeds, and the negative controls: runs with a known fault (broken_run.py), which the comparison must find.

Exit status: 0 every arm holds and every negative control fails; 1 one of them does not; 2 a run could not be made, or something asked for is
wrong; 3 not decided: time was over, fewer than two arms are there, or too few seeds to judge.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


KEYS = {"seeds", "base", "arms", "negative_controls", "checkpoints"}
FAULTS = ("normaliser", "attention")
WRONG, UNDECIDED = 2, 3


def wrong(text: str) -> SystemExit:
    print(text, file=sys.stderr)
    return SystemExit(WRONG)


def read_description(path: Path) -> dict:
    """The YAML file, checked before the first run is made."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise wrong(f"{path}: {error}") from error
    if not isinstance(found, dict) or not {"seeds", "base", "arms"} <= found.keys() <= KEYS:
        raise wrong(f"{path} must have seeds, base and arms, and may have negative_controls and checkpoints; it has {list(found or [])}")
    if not found["seeds"] or not found["arms"]:
        raise wrong(f"{path}: seeds and arms must name at least one each")
    if unknown := set(found.get("negative_controls") or ()) - set(FAULTS):
        raise wrong(f"{path}: negative_controls name {sorted(unknown)}; there are {', '.join(FAULTS)}")
    return found


def flags_of(settings: dict) -> list[str]:
    """Settings by name as flags: true is a bare flag, a list several words."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def plan_of(description: dict) -> list[tuple[str, list[str], str | None]]:
    """(folder, flags, fault) of each run. Seeds come first: all arms of one seed can be compared while the others are made."""
    found = []
    base, arms = description["base"], description["arms"]
    for seed in description["seeds"]:
        for name, settings in arms.items():
            found.append((f"{name}/seed-{seed}", flags_of(base | (settings or {}) | {"seed": seed}), None))
    first, seed = next(iter(arms.items())), description["seeds"][0]
    for fault in description.get("negative_controls") or ():
        found.append((f"negative-control/{fault}", flags_of(base | (first[1] or {}) | {"seed": seed}), fault))
    return found


def progress(folder: Path) -> int:
    """Iterations in a run's record."""
    path = folder / "metrics.jsonl"
    return sum('"lm loss"' in line and '"validation lm loss"' not in line for line in path.open()) if path.exists() else 0


def make(folder: Path, flags: list[str], fault: str | None, launcher: list[str], deadline: float, *, checkpoints: bool) -> bool:
    """Make one run, or go on with it; False when time is over."""
    script = [str(HERE / "broken_run.py"), "--break", fault] if fault else [str(REPOSITORY / "pretrain_gpt_thd.py")]
    saved = ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")] if checkpoints else []
    command = [*launcher, *script, *flags, "--run-dir", str(folder), *saved]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.log").open("a") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return False
                if sys.stderr.isatty():
                    print(f"\r  {folder.parent.name}/{folder.name}: iteration {progress(folder)} ", end="", file=sys.stderr, flush=True)
                time.sleep(0.5)
        finally:  # also when this command is asked to stop
            if process.poll() is None:
                process.terminate()  # the run saves and leaves
                process.wait()
    if process.returncode:
        end = _tail(folder / "output.log")
        raise wrong(f"{shlex.join(command)} failed with status {process.returncode}; the end of {folder / 'output.log'}:\n{end}")
    return True


def same_as_before(folder: Path, flags: list[str], fault: str | None) -> None:
    """A folder holds the run that is asked for, or none: records which one it is.

    Raises:
        SystemExit: it holds another one, which would be taken for this one.
    """
    path, asked = folder / "flags.json", {"flags": flags, "fault": fault}
    if path.exists() and (made := json.loads(path.read_text())) != asked:
        before, now = (set(" ".join(words).replace(" --", "\n--").split("\n")) for words in (made["flags"], flags))
        changed = f"{', '.join(sorted(before - now))}; now {', '.join(sorted(now - before))}"
        raise wrong(f"{folder} holds a run with other flags ({changed}): remove it, or choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asked) + "\n")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Behind -- come more flags of pretrain_gpt_thd.py, for all runs.")
    parser.add_argument("description", type=Path, help="YAML: base, arms, seeds, negative_controls, checkpoints")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder for each run, and report/")
    parser.add_argument("--launcher", default=sys.executable, help="what starts a script (default: this Python, one rank)")
    parser.add_argument("--only", nargs="*", default=[], metavar="ARM", help="arms to make now (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], metavar="SEED", help="seeds to make now (default: all)")
    parser.add_argument("--no-report", action="store_true", help="make runs only: several calls may make different ones side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop the run at hand after so long (it is resumed by the next call)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    own = parser.parse_args(words[:end])
    own.flags, own.output = words[end + 1 :], own.output.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    description = read_description(own.description)
    for flag, given, there in (("--only", own.only, {*description["arms"], "negative-control"}), ("--seeds", own.seeds, set(description["seeds"]))):
        if unknown := set(given) - there:
            parser.error(f"{flag} names {sorted(unknown)}; {own.description} has {sorted(there)}")
    runs, deadline = plan_of(description), time.monotonic() + own.seconds
    wanted = {f"seed-{seed}" for seed in own.seeds}
    chosen = [run for run in runs if (not own.only or run[0].split("/")[0] in own.only) and (not wanted or run[0].split("/")[1] in wanted)]
    for number, (name, flags, fault) in enumerate(chosen, start=1):
        folder = own.output / name
        same_as_before(folder, [*flags, *own.flags], fault)
        if (folder / "summary.json").exists() and not (folder / "unfinished").exists():
            print(f"[{number}/{len(chosen)}] {name}: is there", flush=True)
            continue
        began = time.monotonic()
        (folder / "unfinished").touch()
        whole = make(
            folder, [*flags, *own.flags], fault, shlex.split(own.launcher), deadline, checkpoints=description.get("checkpoints", True)
        )
        if not whole:
            print(f"[{number}/{len(chosen)}] {name}: stopped at iteration {progress(folder)}; the same command goes on", flush=True)
            if not own.no_report:
                report(own.output, description, runs)
            return UNDECIDED
        (folder / "unfinished").unlink()
        print(f"[{number}/{len(chosen)}] {name}: {progress(folder)} iterations, {time.monotonic() - began:.0f} s", flush=True)
    return 0 if own.no_report else report(own.output, description, runs)


def report(output: Path, description: dict, runs: list) -> int:
    """Compare all arms that are there; every negative control must fail."""
    there = [(name, fault) for name, _, fault in runs if (output / name / "summary.json").exists() and not (output / name / "unfinished").exists()]
    compare = [sys.executable, "-m", "megatron_dyn", "compare"]
    arms = [f"{name.split('/')[0]}={output / name}" for name, fault in there if fault is None]
    if len({word.split("=")[0] for word in arms}) < 2:
        print("fewer than two arms are there: no report yet")
        return UNDECIDED
    status = subprocess.run([*compare, *arms, "--output", str(output / "report")], cwd=REPOSITORY).returncode
    if status not in (0, 1, UNDECIDED):
        return WRONG
    reference = f"{next(iter(description['arms']))}={output / runs[0][0]}"
    for name, fault in there:
        if fault is not None:
            found = subprocess.run([*compare, reference, f"{fault}={output / name}", "--json"], cwd=REPOSITORY, capture_output=True, text=True)
            try:
                failed = [verdict["name"] for verdict in json.loads(found.stdout)["verdicts"] if verdict["holds"] is False]
            except ValueError:
                raise wrong(f"negative control '{fault}': the comparison ended with status {found.returncode}:\n{found.stderr}") from None
            print(f"negative control '{fault}': {'found, by ' + ', '.join(failed) if failed else 'NOT FOUND'}")
            status = status if failed else 1
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
