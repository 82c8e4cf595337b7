# SPDX-License-Identifier: Apache-2.0
"""The layers with overlap in every other way that Megatron's can be used: flags, frozen parameters, checkpoints, refusals."""

import pytest
import torch
import torch.distributed as dist
from launch import launch
from layer_pairs import CAPACITY, HIDDEN, KINDS, OVERLAPPED, RING, RS_DGRAD, Pair, Poison, check, configuration, start

from megatron_dyn import userbuffers
from megatron_dyn.layers.overlap import OverlapColumnParallelLinear

# --- flags -------------------------------------------------------------------------------------------------------------

# name of the layer, flags, and the communicators that its forward and its backward use
FLAGS = [
    ("qkv", {}, ["fprop"], ["dgrad", "wgrad"]),
    ("qkv", dict(tp_comm_overlap_ag=False), [], ["dgrad", "wgrad"]),
    ("qkv", dict(tp_comm_overlap_rs=False), ["fprop"], ["dgrad", "wgrad"]),
    ("qkv", dict(tp_comm_bulk_dgrad=False), ["fprop"], ["wgrad"]),
    ("qkv", dict(tp_comm_bulk_wgrad=False), ["fprop"], ["dgrad"]),
    ("qkv", dict(tp_comm_overlap_disable_qkv=True), [], ["dgrad", "wgrad"]),
    ("qkv", dict(tp_comm_overlap_disable_fc1=True), ["fprop"], ["dgrad", "wgrad"]),
    ("qkv", dict(tp_comm_overlap_disable_qkv=True, tp_comm_overlap_rs_dgrad=True), [], ["dgrad", "wgrad"]),
    ("qkv", dict(tp_comm_overlap_ag=False, tp_comm_bulk_dgrad=False, tp_comm_bulk_wgrad=False), [], []),
    ("fc1", RS_DGRAD, ["fprop"], ["dgrad"]),
    ("fc1", RS_DGRAD | dict(tp_comm_overlap_ag=False), [], ["dgrad"]),
    ("fc1", dict(tp_comm_overlap_disable_fc1=True, tp_comm_bulk_dgrad=False, tp_comm_bulk_wgrad=False), [], []),
    ("proj", {}, ["fprop"], ["dgrad"]),
    ("proj", dict(tp_comm_overlap_rs=False), [], ["dgrad"]),
    ("proj", dict(tp_comm_overlap_ag=False), ["fprop"], []),
    ("proj", dict(tp_comm_overlap_rs=False, tp_comm_overlap_ag=False), [], []),
    ("proj", dict(tp_comm_overlap_disable_qkv=True, tp_comm_bulk_dgrad=False, tp_comm_bulk_wgrad=False), ["fprop"], ["dgrad"]),
]
# and with parameters or an input that get no gradient
FROZEN = [
    ("qkv", dict(frozen=["weight", "bias"]), ["fprop"], ["wgrad"]),
    ("qkv", dict(frozen=["input"]), ["fprop"], ["dgrad"]),
    ("qkv", dict(frozen=["bias"]), ["fprop"], ["dgrad", "wgrad"]),
    ("qkv", dict(bias=False), ["fprop"], ["dgrad", "wgrad"]),
    ("qkv", dict(skip_bias_add=True), ["fprop"], ["dgrad", "wgrad"]),
    ("fc1", RS_DGRAD | dict(frozen=["weight", "bias"]), ["fprop"], ["dgrad"]),
    ("fc1", RS_DGRAD | dict(frozen=["input"]), ["fprop"], []),
    ("proj", dict(frozen=["weight"]), ["fprop"], ["dgrad"]),
    ("proj", dict(frozen=["input"]), ["fprop"], []),
    ("proj", dict(frozen=["input", "weight"]), ["fprop"], []),
    ("proj", dict(bias=False), ["fprop"], ["dgrad"]),
    ("proj", dict(skip_bias_add=True), ["fprop"], ["dgrad"]),
]


def used_by_flags(rank: int, world: int, cases: list) -> list:
    """The communicators that each case used in its forward and in its backward."""
    manager = start(RING)
    Poison(manager)
    calls, begin = [], manager.begin

    def seen_begin(used, rows):
        calls.append(([communicator.name for communicator in used], rows))
        begin(used, rows)

    manager.begin = seen_begin
    found = []
    for name, flags, *_ in cases:
        calls.clear()
        pair = Pair(name, seed=rank, **flags)
        early, late = pair.forward(12), pair.forward(6)
        pair.backward(*early)
        pair.backward(*late)
        assert [rows for _, rows in calls] == [12, 6, 12, 6]
        assert calls[0][0] == calls[1][0] and calls[2][0] == calls[3][0]
        found.append([[used.removeprefix(f"{name}_") for used in names] for names, _ in calls[::2]])
    return found


@pytest.mark.parametrize("cases", [FLAGS, FROZEN], ids=["flags", "frozen"])
def test_flags_choose_what_overlaps_and_never_what_is_computed(cases):
    for found in launch(2, used_by_flags, cases):
        for (name, flags, *expected), used in zip(cases, found, strict=True):
            assert used == expected, (name, flags)


# --- what else a layer must be -----------------------------------------------------------------------------------------


def odd_uses(rank: int, world: int) -> None:
    start()
    pair = Pair("qkv", seed=rank)
    layer, megatron = pair.layers
    # Without gradients; a batch dimension; an input that is not contiguous; the weight of somebody else.
    x = torch.randn(2, 3, HIDDEN, generator=pair.generator).transpose(0, 1)
    with torch.no_grad():
        check("output without gradients", layer(x)[0], megatron(x)[0])
        other = torch.randn_like(layer.weight)
        check("output with another weight", layer(x, weight=other)[0], megatron(x, weight=other)[0])
        check("gathered output", layer(x, runtime_gather_output=True)[0], megatron(x, runtime_gather_output=True)[0])
    outputs = [each(x)[0] for each in pair.layers]
    for each, y in zip(pair.layers, outputs):
        assert y._base is None  # the schedule frees outputs, which it refuses for views
        y.sum().backward()  # a gradient that is one number, expanded
    check("weight gradient", layer.weight.grad, megatron.weight.grad)

    # A bias beside a frozen weight is trained (Megatron gives it no gradient).
    layer.weight.requires_grad_(False)
    layer.bias.grad = None
    layer(x)[0].sum().backward()
    assert layer.bias.grad.unique().tolist() == [6 * world]

    # The local rows are all that is kept.
    for name in KINDS:
        pair, kept = Pair(name, seed=rank), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            pair.layers[0](local := torch.randn(12 // pair.rows_in, 1, pair.columns_in, requires_grad=True))
        assert [tensor.data_ptr() for tensor in kept] == [local.data_ptr(), pair.layers[0].weight.data_ptr()]

    # Other buffers, found by name at the next call.
    pair = Pair("proj", seed=rank)
    pair.backward(*pair.forward(CAPACITY))
    forward = pair.forward(CAPACITY)
    userbuffers.destroy_ub()
    with pytest.raises(userbuffers.NotInitializedError, match="initialize_ub"):
        pair.forward(world)
    start(RING, capacity=2 * CAPACITY)
    pair.backward(*forward)
    pair.backward(*pair.forward(2 * CAPACITY))
    with pytest.raises(userbuffers.ActiveShapeError, match="registered for 48"):
        pair.forward(2 * CAPACITY + world)


def test_a_layer_is_megatrons_in_every_other_use():
    launch(2, odd_uses)


def same_as_megatron(rank: int, world: int) -> None:
    """Where nothing overlaps, and what is saved."""
    start()
    for name in KINDS:
        pair = Pair(name, seed=rank)
        here, there = (layer.sharded_state_dict(prefix="layer.", metadata={"dp_cp_group": dist.group.WORLD}) for layer in pair.layers)
        assert list(here) == list(there)
        for key in here:
            assert type(here[key]) is type(there[key])
            if hasattr(here[key], "global_shape"):
                for what in ("key", "global_shape", "global_offset", "axis_fragmentations", "replica_id"):
                    assert getattr(here[key], what, None) == getattr(there[key], what, None), (key, what)
        for parameter, same in zip(*(layer.parameters() for layer in pair.layers), strict=True):
            assert vars(parameter) == vars(same)
    for changes in (dict(tp_comm_overlap=False), dict(sequence_parallel=False), dict(tp_comm_buffer_name="q_proj"), dict(is_expert=True)):
        for name, kind in KINDS.items():
            own = {key: changes[key] for key in ("tp_comm_buffer_name", "is_expert") if key in changes}
            arguments = dict(init_method=torch.nn.init.normal_, bias=False, skip_bias_add=True, tp_comm_buffer_name=name) | own
            arguments |= {} if kind == "column" else dict(input_is_parallel=True)
            config = configuration(**{key: value for key, value in changes.items() if key not in own})
            config.add_bias_linear = False
            group = dist.group.WORLD
            assert OVERLAPPED[kind](HIDDEN, HIDDEN, config=config, tp_group=group, **arguments).overlap is None
    userbuffers.destroy_ub()  # so that a layer that exchanged through the buffers would fail
    plain = OverlapColumnParallelLinear(
        HIDDEN, HIDDEN, config=configuration(tp_comm_overlap=False), init_method=torch.nn.init.normal_, tp_comm_buffer_name="qkv"
    )
    assert plain(torch.ones(2, 1, HIDDEN))[0].shape == (2 * world, 1, HIDDEN // world)


def test_parameters_and_checkpoints_are_megatrons_and_so_is_a_layer_that_has_nothing_to_overlap():
    launch(2, same_as_megatron)


def refusals(rank: int, world: int) -> None:
    def layer(name: str, kind: str, width: int = HIDDEN, **flags):
        arguments = dict(init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False, tp_comm_buffer_name=name)
        arguments |= {} if kind == "column" else dict(input_is_parallel=True)
        config = configuration()
        for flag, value in flags.items():
            setattr(config, flag, value)
        return OVERLAPPED[kind](width, width, config=config, **arguments)

    start(RING)
    for flag in ("cpu_offloading", "enable_autocast", "gradient_accumulation_fusion"):
        with pytest.raises(ValueError, match=f"{flag} does not work with tp_comm_overlap in the local layer 'proj': .* Turn one"):
            layer("proj", "row", **{flag: True})
    x = torch.ones(3, 1, HIDDEN)
    with pytest.raises(userbuffers.OverlapConfigError, match="rs_dgrad is set, but the table .* makes qkv_dgrad 'bulk'"):
        layer("qkv", "column", tp_comm_overlap_rs_dgrad=True)(x)
    with pytest.raises(userbuffers.OverlapConfigError, match="not set for 'fc1', but the table .* makes fc1_dgrad 'ring_exchange'"):
        layer("fc1", "column")(x)
    with pytest.raises(userbuffers.ActiveShapeError, match=r"must be \[3, 8\], but it is \[3, 16\]"):
        layer("qkv", "column", width=2 * HIDDEN)(torch.ones(3, 1, 2 * HIDDEN))
    with pytest.raises(userbuffers.ActiveShapeError, match="7 tokens cannot be divided over 2"):
        layer("proj", "row")(torch.ones(7, 1, HIDDEN // world))
    userbuffers.current().backend.name = "te"
    with pytest.raises(ValueError, match="belong to the 'te' backend, but local layers .* backend='reference'"):
        layer("proj", "row")(torch.ones(6, 1, HIDDEN // world))


def test_what_does_not_work_is_refused_on_every_rank():
    launch(2, refusals)
