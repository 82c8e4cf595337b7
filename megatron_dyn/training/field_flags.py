# SPDX-License-Identifier: Apache-2.0
"""A field of a settings dataclass -> a flag: same name, and the string below the field as its help."""

import argparse
import ast
import dataclasses
import functools
import inspect
import types
import typing


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass.

    Args:
        cls: A dataclass whose source is at hand.

    Returns:
        Field name -> explanation, in the order of the fields.
    """
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0].body
    return {
        node.target.id: inspect.cleandoc(text.value.value)
        for node, text in zip(body, body[1:])
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def flag_name(name: str) -> str:
    """max_tokens -> --max-tokens."""
    return "--" + name.replace("_", "-")


REPLACES: dict[str, tuple[str, ...]] = {
    "global_batch_size": ("global_batch_tokens",),
    "global_batch_tokens": ("global_batch_size",),
    "lr_warmup_iters": ("lr_warmup_fraction",),
    "lr_warmup_fraction": ("lr_warmup_iters",),
    "tokenizer_model": ("vocab_size",),
    "data_path": ("lengths",),
    "lengths": ("data_path",),
}
"""Either/or: what a setting says instead of others."""


def flags_over_file(file: dict[str, object], flags: dict[str, object]) -> dict[str, object]:
    """Settings of a file and of the flags together. Flags win; one of an either/or takes the place of the file's other half."""
    replaced = {other for name in flags for other in REPLACES.get(name, ())} - set(flags)
    return {name: value for name, value in file.items() if name not in replaced} | flags


def add_fields(group: argparse._ArgumentGroup, cls: type, names: typing.Collection[str] | None = None) -> None:
    """Flags of a dataclass's fields (all of them, or those named)."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if names is None or item.name in names:
            _add_field(group, item, hints[item.name], docs.get(item.name, ""))


def _add_field(group: argparse._ArgumentGroup, item: dataclasses.Field, hint: object, doc: str) -> None:
    base, choices = base_type(hint)
    default = None if item.default is dataclasses.MISSING else item.default
    shown = doc.replace("%", "%%") + ("" if default in (None, False) else f" (default: {default})")
    flag = flag_name(item.name)
    if base is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=shown)
    elif base is list:
        group.add_argument(flag, nargs="+", metavar="X", help=shown)
    elif choices:
        group.add_argument(flag, choices=choices, help=shown)
    else:
        metavar = {int: "N", float: "X", str: "S"}[base]
        words = words_beside(hint)
        if words:
            group.add_argument(flag, type=_or_word(base, words), metavar="|".join([metavar, *words]), help=shown)
        else:
            group.add_argument(flag, type=base, metavar=metavar, help=shown)


def words_beside(hint: object) -> list[str]:
    """Words that may stand in the place of a number: int | Literal["auto"] | None -> ["auto"]; [] where there is none."""
    options = typing.get_args(hint) if base_type(hint)[1] is None else ()
    return [word for option in options if typing.get_origin(option) is typing.Literal for word in typing.get_args(option)]


def _or_word(base: type, words: list[str]) -> typing.Callable[[str], object]:
    def read(text: str) -> object:
        return text if text in words else base(text)

    read.__name__ = " or ".join([base.__name__, *words])  # argparse names it where a value is neither
    return read


def base_type(hint: object) -> tuple[type, list | None]:
    """int | None -> (int, None); Literal["a", "b"] -> (str, ["a", "b"]); list[str] -> (list, None)."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return base_type(options[0])
    if typing.get_origin(hint) is typing.Literal:
        return type(options[0]), options
    if typing.get_origin(hint) in (list, tuple):
        return list, None
    return hint, None
