# SPDX-License-Identifier: Apache-2.0
"""Which communicators there are and how each overlaps: Transformer Engine's defaults, and what the user's table changes of them.

The table is that of Megatron's ``--tp-comm-overlap-cfg`` and of ``ub_cfgs`` in ``transformer_engine.pytorch.initialize_ub``, whose rules these
are (TE 2.11 to 2.20): ``{"qkv_fprop": {"method": "ring_exchange", "num_sm": 1, ...}, ...}``.
"""

import difflib
from pathlib import Path
from typing import Mapping

from megatron_dyn.userbuffers.communicator import CommunicatorSpec

DEFAULT_METHODS: dict[str, str] = {
    "qkv_fprop": "ring_exchange",
    "fc1_fprop": "ring_exchange",
    "proj_dgrad": "ring_exchange",
    "fc2_dgrad": "ring_exchange",
    "proj_fprop": "pipeline",
    "fc2_fprop": "pipeline",
    "qkv_dgrad": "bulk",
    "qkv_wgrad": "bulk",
    "fc1_dgrad": "bulk",
    "fc1_wgrad": "bulk",
    "proj_wgrad": "external",
    "fc2_wgrad": "external",
}
EXTERNAL = tuple(name for name, method in DEFAULT_METHODS.items() if method == "external")
METHODS = ("ring_exchange", "pipeline", "bulk", "external")
REDUCE_SCATTERS = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")
# When the input gradient is reduce-scattered beside its own GEMM, the bulk reduce-scatter beside the weight gradient is not made.
DGRADS_OF_COLUMNS = ("qkv_dgrad", "fc1_dgrad")
OPTIONS = ("method", "is_reduce_scatter", "num_sm", "cga_size", "set_sm_margin", "num_splits", "aggregate", "atomic_gemm", "use_ce", "fp8_buf",
           "comm_priority", "gemm_priority", "pipeline_rs_overlap_first_gemm")  # fmt: skip
SWITCHES = ("is_reduce_scatter", "set_sm_margin", "aggregate", "atomic_gemm", "use_ce", "fp8_buf", "pipeline_rs_overlap_first_gemm")
DEFAULT_PIPELINE_SPLITS = 4


class OverlapConfigError(ValueError):
    """The table of communicators asks for something that does not exist or cannot work."""


def read_overlap_config(path: str | Path) -> dict[str, dict]:
    """The table of a ``--tp-comm-overlap-cfg`` file.

    Raises:
        OverlapConfigError: not a YAML table of tables.
        OSError: the file cannot be read.
    """
    import yaml

    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OverlapConfigError(f"{path} is not YAML: {error}") from None
    if table is None:
        return {}
    if not isinstance(table, dict) or not all(isinstance(options, dict) for options in table.values()):
        raise OverlapConfigError(f"{path} must be a table of tables, such as 'qkv_fprop: {{method: ring_exchange}}'.")
    return table


def communicator_specs(table: Mapping[str, Mapping] | None, tp_size: int, *, hidden: int | None = None) -> dict[str, CommunicatorSpec]:
    """All communicators by name.

    Args:
        table: what differs from the defaults, by communicator name.
        tp_size: ranks of the tensor-parallel group.
        hidden: columns of the buffer, to check ``num_splits`` where the hidden dimension is split.
    Raises:
        OverlapConfigError: an unknown name, method or option, or a combination that cannot work; the message says which.
    """
    if table is not None and not (isinstance(table, Mapping) and all(isinstance(options, Mapping) for options in table.values())):
        raise OverlapConfigError(f"the table of communicators is {table!r}: give a table of tables, such as {{'qkv_fprop': {{'method': 'ring_exchange'}}}}.")
    table = dict(table or {})
    methods, reduce_scatters = dict(DEFAULT_METHODS), set(REDUCE_SCATTERS)
    for name, options in table.items():
        _check_names(name, options)
    for name in DGRADS_OF_COLUMNS:
        if table.get(name, {}).get("method", "bulk") == "bulk":
            continue
        wgrad = name.replace("dgrad", "wgrad")
        if wgrad in table:
            raise OverlapConfigError(
                f"{name} is reduce-scattered beside its own GEMM (method {table[name]['method']!r}), so there is no {wgrad} to configure: "
                f"leave {wgrad} out, or make {name} 'bulk'."
            )
        del methods[wgrad]
        reduce_scatters.discard(wgrad)
        reduce_scatters.add(name)
    for name, options in table.items():
        if name in methods:
            methods[name] = options.get("method", methods[name])
    return {
        name: _spec(name, method, name in reduce_scatters, dict(table.get(name, {})), tp_size, hidden) for name, method in methods.items()
    }


def _check_names(name: str, options: Mapping) -> None:
    if name not in DEFAULT_METHODS:
        near = difflib.get_close_matches(str(name), DEFAULT_METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OverlapConfigError(f"no communicator is called {name!r}{hint} There are: {', '.join(DEFAULT_METHODS)}.")
    for option, value in options.items():
        if option not in OPTIONS:
            raise OverlapConfigError(f"{name} has no option {option!r}: use {', '.join(OPTIONS)}.")
        if option in SWITCHES and value not in (True, False):
            raise OverlapConfigError(f"{name} has {option}: {value!r}, which is neither true nor false.")
        if option not in SWITCHES and option != "method" and type(value) is not int:
            raise OverlapConfigError(f"{name} has {option}: {value!r}, which is not a whole number.")
    method = options.get("method", DEFAULT_METHODS[name])
    if method not in METHODS:
        raise OverlapConfigError(f"{name} cannot use method {method!r}: use {', '.join(METHODS)}.")


def _spec(name: str, method: str, is_reduce_scatter: bool, options: dict, tp_size: int, hidden: int | None) -> CommunicatorSpec:
    asked = options.get("is_reduce_scatter")
    if asked is not None and bool(asked) != is_reduce_scatter:
        raise OverlapConfigError(
            f"{name} is {'a reduce-scatter' if is_reduce_scatter else 'an all-gather'}, but the table says is_reduce_scatter: {bool(asked)}; "
            "leave that option out."
        )
    if method == "pipeline" and not is_reduce_scatter:
        raise OverlapConfigError(f"{name} is an all-gather, which has no 'pipeline' method: use 'ring_exchange'.")
    default = DEFAULT_METHODS[name]
    if (method == "external") != (default == "external"):
        raise OverlapConfigError(f"{name} cannot use method {method!r}: {'only' if default == 'external' else 'never'} 'external' fits here.")
    if method == "bulk" and default != "bulk":
        raise OverlapConfigError(
            f"{name} cannot use method 'bulk': its exchange belongs to its own GEMM. Use {' or '.join(repr(m) for m in {default: 0, 'ring_exchange': 0})}."
        )
    if name.endswith("_wgrad") and default == "bulk" and method != "bulk":
        raise OverlapConfigError(f"{name} cannot use method {method!r}: the exchange beside a weight gradient is 'bulk'.")
    splits = tp_size if method == "ring_exchange" else options.get("num_splits", DEFAULT_PIPELINE_SPLITS)
    if splits < 1 or (method == "pipeline" and hidden is not None and hidden % splits):
        raise OverlapConfigError(
            f"{name} splits the hidden dimension into num_splits: {splits}, which must be at least 1 and divide the hidden size {hidden}. Set "
            f"num_splits of {name} in the table of communicators, or make it 'ring_exchange'."
        )
    return CommunicatorSpec(name=name, method=method, is_reduce_scatter=is_reduce_scatter, num_splits=splits, options=options)  # type: ignore[arg-type]
