# SPDX-License-Identifier: Apache-2.0
"""From the bytes of a record to its text, strictly: what is not exactly right is named by file, line and byte."""

import json
from typing import NoReturn

from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.inputs import Record


class BadRecordError(CorpusError):
    """One record cannot be used; ``--on-bad-record skip`` leaves it out and counts it."""


def _bad(record: Record, what: str) -> NoReturn:
    raise BadRecordError(f"{record.where}: {what}")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(double)} comes twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _decode_utf8(record: Record) -> str:
    try:
        return record.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = record.raw[error.start]
        _bad(record, f"not valid UTF-8 at byte {record.offset + error.start} of the file (0x{byte:02x}: {error.reason})")


def _parse_json(record: Record, text: str) -> object:
    try:
        return _decoder.decode(text)
    except json.JSONDecodeError as error:
        byte = record.offset + len(text[: error.pos].encode())
        _bad(record, f"is not complete JSON (byte {record.offset}): {error.msg.removesuffix(' at')} at byte {byte} of the file")
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        _bad(record, f"is not strict JSON (byte {record.offset}): {reason}")


def text_of(record: Record, json_key: str) -> str:
    """The text of a record: the file itself, or the value of ``json_key`` in a JSONL line.

    Raises:
        BadRecordError: invalid UTF-8, not one complete JSON object, a repeated key, no such key, no text, or a lone surrogate.
    """
    text = _decode_utf8(record)
    if record.line == 0:
        return text
    if not text.strip(" \t\r\n"):
        _bad(record, f"is blank (byte {record.offset}); every line holds one JSON object")
    value = _parse_json(record, text)
    if not isinstance(value, dict):
        _bad(record, f"is not a JSON object but a {type(value).__name__} (byte {record.offset})")
    if json_key not in value:
        keys = ", ".join(json.dumps(key) for key in list(value)[:8]) or "none"
        _bad(record, f'has no key "{json_key}" (byte {record.offset}; its keys: {keys}); choose one with --json-key')
    found = value[json_key]
    if not isinstance(found, str):
        _bad(record, f'the value of "{json_key}" is a {type(found).__name__}, not a text (byte {record.offset})')
    try:
        found.encode("utf-8")
    except UnicodeEncodeError as error:
        _bad(record, f'"{json_key}" holds the lone surrogate U+{ord(found[error.start]):04X} at character {error.start}: not Unicode text')
    return found
