# SPDX-License-Identifier: Apache-2.0
"""Which shapes are taken and which are refused, and that a refusal changes nothing."""

import pytest
import torch
from fake_backend import FakeBackend
from hypothesis import given, settings, strategies as st

from megatron_dyn.userbuffers import ActiveShapeError, UserBuffers, check_active_shape


@pytest.mark.parametrize(
    "shape, says",
    [
        ([8], "two-dimensional"),
        ([2, 4, 8], "two-dimensional"),
        ([8.0, 8], "two-dimensional"),
        ([True, 8], "two-dimensional"),
        ("ab", "two-dimensional"),
        (8, "two-dimensional"),
        (None, "two-dimensional"),
        ([0, 8], "empty"),
        ([-2, 8], "empty"),
        ([8, 0], "empty"),
        ([66, 8], "registered for 64: the exchange would write 2 rows past"),
        ([8, 4], "4 columns, but the buffer was registered for a hidden size of 8"),
        ([7, 8], "7 tokens cannot be divided over 2 tensor-parallel ranks (1 left over)"),
    ],
)
def test_a_shape_that_a_buffer_cannot_take_is_refused_with_its_numbers_and_the_old_one_stays(shape, says):
    backend = FakeBackend()
    manager = UserBuffers(backend)
    manager.set_active_shape([16, 8])
    before = list(backend.calls)
    for refuse in (manager.set_active_shape, manager.get("qkv_fprop").set_buffer_active_shape):
        with pytest.raises(ActiveShapeError, match=says.replace("(", r"\(").replace(")", r"\)")) as refused:
            refuse(shape)
        assert isinstance(refused.value, ValueError)
    assert backend.calls == before
    assert manager.active_shape == [16, 8]
    assert all(c.get_buffer_active_shape() == [16, 8] for c in manager.communicators.values())


def test_a_shape_is_refused_just_so_while_one_communicator_has_its_own():
    manager = UserBuffers(FakeBackend())
    manager.get("qkv_fprop").set_buffer_active_shape([16, 8])
    for shape in (None, 8, [], [None, 8], [7, 8]):
        with pytest.raises(ActiveShapeError):
            manager.set_active_shape(shape)
    assert manager.get("qkv_fprop").rows == 16 and manager.get("fc1_fprop").rows == 64


def test_fp8_rows_that_are_not_aligned_are_refused_and_unquantized_ones_are_not_held_to_it():
    shapes = dict(capacity=(128, 8), tp_size=2)
    assert check_active_shape([96, 8], **shapes, local_rows=16) == 96
    assert check_active_shape([34, 8], **shapes) == 34
    with pytest.raises(ActiveShapeError, match="17 local rows are not a multiple of 16.*multiple of 32"):
        check_active_shape([34, 8], **shapes, local_rows=16)
    manager = UserBuffers(FakeBackend(fp8=True, capacity=(128, 8), local_rows=16))
    with pytest.raises(ActiveShapeError, match="17 local rows"):
        manager.set_active_shape([34, 8])
    manager.get("qkv_fprop", quantized=False).set_buffer_active_shape([34, 8])
    with pytest.raises(ActiveShapeError, match="17 local rows"):
        manager.get("qkv_fprop", quantized=True).set_buffer_active_shape([34, 8])


def test_a_torch_size_and_a_tuple_are_shapes_too():
    backend = FakeBackend()
    manager = UserBuffers(backend, layout_fence="never")
    manager.set_active_shape(torch.empty(16, 8).shape)
    manager.set_active_shape((16, 8))
    manager.set_active_shape([16, 8])
    assert backend.calls == [("all", 16)]


SIZES = st.one_of(st.integers(-3, 200), st.sampled_from([0, 8, 16, 64, 96]), st.floats(allow_nan=True), st.booleans(), st.none())


@settings(max_examples=300, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    capacity_units=st.integers(1, 12),
    hidden=st.sampled_from([8, 16]),
    local_rows=st.sampled_from([1, 16]),
    shapes=st.lists(st.lists(SIZES, min_size=0, max_size=3), min_size=1, max_size=12),
)
def test_any_sequence_of_shapes_leaves_the_last_one_that_fits(tp, capacity_units, hidden, local_rows, shapes):
    capacity = (capacity_units * tp * local_rows, hidden)
    backend = FakeBackend(fp8=local_rows > 1, capacity=capacity, tp_size=tp, local_rows=local_rows)
    manager = UserBuffers(backend)
    expected = list(capacity)
    for shape in shapes:
        whole = len(shape) == 2 and all(type(size) is int for size in shape)
        fits = whole and 0 < shape[0] <= capacity[0] and shape[1] == hidden and shape[0] % tp == 0 and shape[0] // tp % local_rows == 0
        if fits:
            expected = shape
            manager.set_active_shape(shape)
        else:
            with pytest.raises(ActiveShapeError):
                manager.set_active_shape(shape)
        assert manager.active_shape == expected
        assert {tuple(c.get_buffer_active_shape()) for c in manager.communicators.values()} == {tuple(expected)}
        assert {tuple(c.get_buffer_capacity_shape()) for c in manager.communicators.values()} == {capacity}
