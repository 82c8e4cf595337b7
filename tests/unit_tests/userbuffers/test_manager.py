# SPDX-License-Identifier: Apache-2.0
"""One call for a change, nothing for the shape that is set, and a fence exactly where layouts could race."""

import random

import pytest
from fake_backend import FakeBackend

from megatron_dyn.userbuffers import ActiveShapeError, UserBuffers

FORWARD = [("qkv_fprop",), ("proj_fprop",), ("fc1_fprop",), ("fc2_fprop",)]
BACKWARD = [("fc2_dgrad", "fc2_wgrad"), ("fc1_dgrad", "fc1_wgrad"), ("proj_dgrad", "proj_wgrad"), ("qkv_dgrad", "qkv_wgrad")]


def made(**options):
    fence = options.pop("layout_fence", "auto")
    backend = FakeBackend(**options)
    return UserBuffers(backend, layout_fence=fence), backend


def run(manager, calls, rows):
    for names in calls:
        manager.begin(tuple(manager.get(name) for name in names), rows)


def test_a_change_is_one_call_for_all_and_the_same_shape_none():
    manager, backend = made(layout_fence="never")
    manager.set_active_shape([32, 8])
    manager.set_active_shape([32, 8])
    run(manager, FORWARD, 32)
    assert backend.calls == [("all", 32)]
    run(manager, FORWARD + BACKWARD, 16)
    assert backend.calls == [("all", 32), ("all", 16)]


def test_capacity_is_the_shape_at_first():
    manager, backend = made()
    manager.set_active_shape([64, 8])
    assert backend.calls == []
    assert manager.active_shape == [64, 8]


def test_a_single_communicator_keeps_its_own_shape_until_all_are_set():
    manager, backend = made(layout_fence="never")
    one = manager.get("proj_fprop")
    one.set_buffer_active_shape([8, 8])
    assert one.get_buffer_active_shape() == [8, 8]
    assert manager.get("qkv_fprop").get_buffer_active_shape() == [64, 8]
    manager.set_active_shape([64, 8])  # the shape that all the others have: still a change for this one
    assert one.get_buffer_active_shape() == [64, 8]
    assert backend.calls == [("proj_fprop", 8), ("all", 64)]


def test_a_layer_call_overrides_a_single_communicator_too():
    manager, backend = made(layout_fence="never")
    manager.get("proj_fprop").set_buffer_active_shape([8, 8])
    run(manager, [("proj_fprop",)], 64)
    assert backend.calls[-1] == ("all", 64)


@pytest.mark.parametrize("pipeline", [False, True], ids=["in order", "1F1B"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_transformer_block_needs_no_fence_whatever_the_shapes(layers, pipeline):
    manager, backend = made()
    draw = random.Random(1)
    waiting = []
    for _ in range(50):
        rows = 2 * draw.randint(1, 32)
        run(manager, FORWARD * layers, rows)
        waiting.append(rows)
        if not pipeline or len(waiting) > 2:
            run(manager, BACKWARD * layers, waiting.pop(0))
    assert manager.fences == 0 and "fence" not in backend.calls


def test_a_communicator_used_twice_in_a_row_is_fenced_where_its_layout_changes_and_only_there():
    manager, backend = made()
    alone = [("proj_fprop",)]
    run(manager, alone, 64)
    run(manager, alone, 64)
    assert manager.fences == 0
    run(manager, alone, 32)
    assert backend.calls == [("all", 32), "fence"]
    run(manager, alone, 32)
    assert manager.fences == 1
    run(manager, alone, 64)
    run(manager, alone, 32)
    assert manager.fences == 3


def test_an_exchange_of_another_layer_in_between_makes_the_fence_needless():
    manager, _ = made()
    for rows in (64, 32, 8, 64, 2):
        run(manager, [("qkv_fprop",), ("proj_fprop",)], rows)
    manager.begin((), 16)  # a layer that exchanges by other means orders the ranks just as well
    run(manager, [("proj_fprop",)], 16)
    assert manager.fences == 0


def test_the_change_may_happen_in_a_layer_that_does_not_use_the_communicator():
    """Mutant: fence when the manager's shape changes, not when a communicator's layout differs from its last use."""
    manager, _ = made()
    run(manager, [("proj_fprop",)], 64)
    manager.set_active_shape([64, 8])
    run(manager, [("proj_fprop",)], 64)
    assert manager.fences == 0
    manager.layout_fence = "auto"
    run(manager, [("qkv_fprop",)], 32)
    run(manager, [("proj_fprop",)], 32)
    run(manager, [("proj_fprop",)], 8)
    assert manager.fences == 1


def test_a_forward_and_a_backward_that_share_a_buffer_are_two_uses():
    manager, _ = made()
    run(manager, [("fc2_dgrad",)], 64)
    run(manager, [("fc2_dgrad",)], 32)
    assert manager.fences == 1


def test_calls_from_outside_the_layers_fence_every_change_because_their_uses_are_unseen():
    manager, backend = made()
    manager.set_active_shape([32, 8])
    manager.set_active_shape([32, 8])
    manager.set_active_shape([16, 8])
    manager.get("qkv_fprop").set_buffer_active_shape([8, 8])
    assert backend.calls == [("all", 32), "fence", ("all", 16), "fence", ("qkv_fprop", 8), "fence"]
    # The fence is an exchange: the layer that comes next needs none.
    run(manager, [("proj_fprop",)], 16)
    assert manager.fences == 3


def test_a_layer_call_after_a_shape_from_outside_is_fenced_where_it_changes_the_layout_again():
    """Somebody may have exchanged through the buffers in between, and the manager sees layer calls only."""
    for single in (False, True):
        for shape in ([64, 8], [32, 8]):  # the same as before, and another
            manager, _ = made()
            (manager.get("proj_fprop").set_buffer_active_shape if single else manager.set_active_shape)(shape)
            fences = manager.fences
            run(manager, [("proj_fprop",)], 16)
            assert manager.fences == fences + 1
            run(manager, [("qkv_fprop",), ("proj_fprop",)], 64)  # seen again
            assert manager.fences == fences + 1
    manager, _ = made()
    manager.set_active_shape([64, 8])
    run(manager, [("proj_fprop",)], 64)
    run(manager, [("qkv_fprop",)], 32)
    assert manager.fences == 0


def test_the_first_change_of_adopted_communicators_is_fenced_for_their_owner_may_just_have_used_them():
    for adopted in (False, True):
        backend = FakeBackend()
        backend.adopted = adopted
        manager = UserBuffers(backend)
        run(manager, [("proj_fprop",), ("qkv_fprop",)], 32)
        assert manager.fences == adopted


def test_always_fences_every_layer_call_and_never_none():
    manager, _ = made(layout_fence="always")
    run(manager, FORWARD, 64)
    assert manager.fences == 4
    manager, backend = made(layout_fence="never")
    run(manager, [("proj_fprop",)] * 2, 64)
    run(manager, [("proj_fprop",)], 32)
    manager.set_active_shape([8, 8])
    assert backend.calls == [("all", 32), ("all", 8)]


def test_two_sided_exchanges_need_no_fence():
    manager, backend = made(one_sided=False)
    run(manager, [("proj_fprop",)], 64)
    run(manager, [("proj_fprop",)], 32)
    manager.set_active_shape([8, 8])
    assert "fence" not in backend.calls


def test_a_refused_layer_call_changes_nothing():
    manager, backend = made()
    with pytest.raises(ActiveShapeError, match="66 tokens"):
        run(manager, [("qkv_fprop",)], 66)
    assert backend.calls == [] and manager.active_shape == [64, 8]


def test_unknown_names_list_those_there_are():
    manager, _ = made()
    with pytest.raises(KeyError, match="no communicator 'fc3_fprop'.*fc1_fprop"):
        manager.get("fc3_fprop")
    with pytest.raises(KeyError, match="for FP8"):
        manager.get("fc1_fprop", quantized=True)


def test_an_unknown_fence_policy_is_refused():
    with pytest.raises(ValueError, match="'sometimes' is not known: use one of auto, always, never"):
        UserBuffers(FakeBackend(), layout_fence="sometimes")


def test_a_destroyed_communicator_says_so():
    manager, backend = made()
    one = manager.get("qkv_fprop")
    manager.close()
    assert backend.calls == ["close"]
    with pytest.raises(ActiveShapeError, match="destroy_ub"):
        one.set_buffer_active_shape([8, 8])
    for rows in (8, 64):
        with pytest.raises(ActiveShapeError, match="were destroyed with destroy_ub"):
            manager.begin((one,), rows)
        with pytest.raises(ActiveShapeError, match="were destroyed with destroy_ub"):
            manager.set_active_shape([rows, 8])
