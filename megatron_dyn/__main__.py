# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_dyn COMMAND ...``: finds the command's room and calls it."""

import importlib
import os
import sys
from typing import NamedTuple, Sequence

from megatron_dyn import __version__


class Command(NamedTuple):
    """Where a command lives: imported only when it is called, so that each pays for its own imports alone."""

    module: str
    function: str  # (argv) -> exit status
    summary: str


COMMANDS = {
    "preprocess": Command("megatron_dyn.corpus.cli", "preprocess_main", "documents (JSONL or text files) -> Megatron .bin/.idx"),
    "tokenizer": Command("megatron_dyn.corpus.cli", "tokenizer_main", "train or inspect a SentencePiece tokenizer"),
    "corpus": Command("megatron_dyn.corpus.cli", "corpus_main", "check a .bin/.idx pair and print what it holds"),
    "plan": Command("megatron_dyn.training.plan_command", "main", "fill, balance and time of the plans of a corpus, beside other ways to divide it"),
    "env": Command("megatron_dyn.environment", "main", "what was found here (torch, CUDA, Transformer Engine, ...) and what is used of it"),
    "flags": Command("megatron_dyn.training.cli", "flags", "the flags of pretrain_gpt_thd.py as a Markdown page"),
    "calibrate": Command("megatron_dyn.training.calibrate", "main", "measure what tokens and attention cost here, for the planner's balance"),
    "compare": Command("megatron_dyn.compare.command", "main", "do runs train alike, and which is faster: verdicts, pictures, a page"),
    "report": Command("megatron_dyn.training.cli", "report", "summary and pictures of a run from its folder"),
}
TRACEBACK_VARIABLE = "MEGATRON_DYN_TRACEBACK"


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: python -m megatron_dyn COMMAND ...", "", *lines, "", "COMMAND --help explains one."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Exit status; 2 when an input is wrong: then one line on stderr says what (the traceback too with MEGATRON_DYN_TRACEBACK=1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        print((f"megatron_dyn: no command {name!r}\n" if name else "") + usage(), file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        return getattr(importlib.import_module(command.module), command.function)(arguments[1:])
    except (ValueError, OSError) as error:  # the house's errors are ValueErrors with a message for the user
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(f"megatron_dyn {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megatron_dyn {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
