# SPDX-License-Identifier: Apache-2.0
"""Command lines of this room: ``preprocess``, ``tokenizer train|inspect`` and ``corpus inspect``."""

import argparse
import signal
import sys
import time
from contextlib import contextmanager
from typing import Callable, Iterator, NoReturn, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megatron_dyn.corpus.inputs import InputSelection
from megatron_dyn.corpus.inspect import Rows, corpus_facts, tokenizer_facts
from megatron_dyn.corpus.preprocess import PreprocessConfig, PreprocessReport, preprocess
from megatron_dyn.corpus.tokenizer import SentencePieceTokenizer
from megatron_dyn.corpus.tokenizer_training import TokenizerTrainingConfig, train_tokenizer

UNKNOWN_SHARE_WARNING = 0.01


def _print_table(title: str, rows: Rows) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, escape(value))
    Console(highlight=False).print(table)


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, fed with (bytes done, bytes in all); drawn from the first report on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=None)

    def report(done: int, total: int) -> None:
        bar.start()  # not before: worker processes are forked before this thread exists
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", action="extend", required=True, help="JSONL files (also .gz, .xz, .zst), patterns of them, or folders of text files with --glob")
    group.add_argument("--glob", help="text files inside folders, one document a file, such as '**/*.py'")
    group.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="relative paths to leave out (* also matches /); repeatable")
    group.add_argument("--json-key", default="text", help="key of the text in a JSONL record (default: %(default)s)")


def _selection(arguments: argparse.Namespace) -> InputSelection:
    return InputSelection(inputs=arguments.input, glob=arguments.glob, exclude=arguments.exclude, json_key=arguments.json_key)


def _stop_on_sigterm() -> None:
    """SIGTERM unwinds the stack, so that partial files are removed."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def preprocess_main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_dyn preprocess``."""
    parser = argparse.ArgumentParser(
        prog="megatron-dyn preprocess",
        description="Tokenize documents into Megatron's .bin/.idx. The output is the same for any number of workers, and appears only when it is complete.",
    )
    _add_selection(parser)
    group = parser.add_argument_group("tokens and output")
    group.add_argument("--tokenizer-model", required=True, help="SentencePiece .model file")
    group.add_argument("--append-eod", action="store_true", help="put the tokenizer's end-of-document id after each document")
    group.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx, replacing a finished pair at the very end")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: %(default)s)")
    group.add_argument("--on-bad-record", choices=("error", "skip"), default="error", help="a record that is not strict UTF-8 or JSON, or has no text (default: %(default)s)")
    group.add_argument(
        "--on-empty", choices=("skip", "keep"), default="skip", help="a document without tokens; keep writes it, so that documents are numbered as in the input (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    _stop_on_sigterm()
    config = PreprocessConfig(
        selection=_selection(arguments),
        tokenizer_model=arguments.tokenizer_model,
        output_prefix=arguments.output_prefix,
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        on_bad_record=arguments.on_bad_record,
        on_empty=arguments.on_empty,
    )
    start = time.perf_counter()
    with _progress("tokenizing") as on_progress:
        report = preprocess(config, on_progress)
    for message in report.messages:
        print(f"skipped: {message}", file=sys.stderr)
    _print_table(f"{config.output_prefix}.bin, .idx", _report_rows(report, config.on_empty == "keep", time.perf_counter() - start))
    if report.unknown_share > UNKNOWN_SHARE_WARNING:
        print(f"warning: {report.unknown_share:.2%} of the tokens are unknown to {config.tokenizer_model}: is it the right tokenizer?", file=sys.stderr)
    return 0


def _report_rows(report: PreprocessReport, kept_empty: bool, seconds: float) -> Rows:
    return [
        ("documents", f"{report.documents:,}"),
        ("tokens", f"{report.tokens:,} ({report.dtype})"),
        ("empty documents", f"{report.empty:,} ({'kept' if kept_empty else 'left out'})"),
        ("bad records skipped", f"{report.skipped:,}"),
        ("unknown ids", f"{report.unknown:,} ({report.unknown_share:.3%} of the tokens)"),
        ("bytes per token", f"{report.text_bytes / report.tokens:.2f}"),
        ("seconds", f"{seconds:.1f} ({report.text_bytes / seconds / 1e6:.1f} MB/s)"),
    ]


def tokenizer_main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_dyn tokenizer train|inspect``."""
    parser = argparse.ArgumentParser(prog="megatron-dyn tokenizer", description="Train or look at a SentencePiece tokenizer.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="learn a tokenizer that keeps newlines and indentation")
    _add_selection(train)
    group = train.add_argument_group("tokenizer")
    group.add_argument("--vocab-size", type=int, default=TokenizerTrainingConfig.vocab_size, help="default: %(default)s")
    group.add_argument("--model-prefix", required=True, help="writes PREFIX.model")
    group.add_argument("--model-type", choices=("bpe", "unigram"), default=TokenizerTrainingConfig.model_type, help="default: %(default)s")
    group.add_argument("--max-bytes", type=int, default=TokenizerTrainingConfig.max_bytes, help="learn from a sample of this size, spread over the input (default: %(default)s)")
    group.add_argument("--on-bad-record", choices=("error", "skip"), default=TokenizerTrainingConfig.on_bad_record, help="default: %(default)s")
    inspect = commands.add_parser("inspect", help="special ids and, with --text, the encoding of a text")
    inspect.add_argument("model", help=".model file")
    inspect.add_argument("--text", help="text to encode and decode again")
    arguments = parser.parse_args(argv)
    if arguments.command == "inspect":
        _print_table(arguments.model, tokenizer_facts(SentencePieceTokenizer(arguments.model), arguments.text))
    else:
        _train(arguments)
    return 0


def _train(arguments: argparse.Namespace) -> None:
    _stop_on_sigterm()
    config = TokenizerTrainingConfig(
        selection=_selection(arguments),
        model_prefix=arguments.model_prefix,
        vocab_size=arguments.vocab_size,
        model_type=arguments.model_type,
        max_bytes=arguments.max_bytes,
        on_bad_record=arguments.on_bad_record,
    )
    start = time.perf_counter()
    with _progress("reading, then training") as on_progress:
        sample = train_tokenizer(config, on_progress)
    rows = [
        ("learned from", f"{sample.documents:,} of {sample.seen:,} documents, {sample.lines:,} lines, {sample.text_bytes:,} bytes"),
        ("bad records skipped", f"{sample.skipped:,}"),
        ("seconds", f"{time.perf_counter() - start:.1f}"),
    ]
    model = f"{config.model_prefix}.model"
    _print_table(model, rows + tokenizer_facts(SentencePieceTokenizer(model), None))


def corpus_main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_dyn corpus inspect``."""
    parser = argparse.ArgumentParser(prog="megatron-dyn corpus", description="Look at a .bin/.idx pair.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="check every entry and every token, and print what it holds")
    inspect.add_argument("prefix", help="path without .bin/.idx")
    inspect.add_argument("--tokenizer-model", help="SentencePiece .model whose vocabulary the ids must be in")
    arguments = parser.parse_args(argv)
    tokenizer = SentencePieceTokenizer(arguments.tokenizer_model) if arguments.tokenizer_model else None
    _print_table(arguments.prefix, corpus_facts(arguments.prefix, tokenizer))
    return 0
