# SPDX-License-Identifier: Apache-2.0
"""Buffers, views and refusals of the reference backend as one rank of four sees them, on a process group that sends nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_dyn.userbuffers.reference_exchanges as exchanges
from megatron_dyn import device
from megatron_dyn.userbuffers import ActiveShapeError, OverlapConfigError, UserBuffers
from megatron_dyn.userbuffers.quantization import UserBufferQuantizationMode
from megatron_dyn.userbuffers.reference import ReferenceBackend

TP, RANK, CAPACITY, HIDDEN = 4, 1, 96, 8
NONE, FP8 = UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8
TABLE = {"proj_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"num_splits": 2}}


@pytest.fixture(autouse=True)
def rank_1_of_4():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=TP)
    yield
    dist.destroy_process_group()


def made(modes=(NONE,), table=None, dtype=torch.float32, local_rows=16) -> ReferenceBackend:
    options = dict(modes=modes, dtype=dtype, tables=[table] * len(modes), local_rows=local_rows)
    return ReferenceBackend((CAPACITY, HIDDEN), tp_size=TP, tp_group=dist.group.WORLD, **options)


class Messages:
    """The size of everything that is handed to torch.distributed."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: list[tuple[str, int]] = []
        gather, reduce_scatter, exchange = exchanges.all_gather_single, exchanges.reduce_scatter_single, dist.batch_isend_irecv

        def seen_gather(output, local, **kwargs):
            self.sizes.append(("gather", output.numel()))
            assert output.numel() == TP * local.numel()
            return gather(output, local, **kwargs)

        def seen_reduce_scatter(local, partial, **kwargs):
            self.sizes.append(("reduce-scatter", partial.numel()))
            assert partial.numel() == TP * local.numel()
            return reduce_scatter(local, partial, **kwargs)

        def seen_exchange(operations):
            self.sizes += [(operation.op.__name__, operation.tensor.numel()) for operation in operations]
            return exchange(operations)

        monkeypatch.setattr(exchanges, "all_gather_single", seen_gather)
        monkeypatch.setattr(exchanges, "reduce_scatter_single", seen_reduce_scatter)
        monkeypatch.setattr(dist, "batch_isend_irecv", seen_exchange)


def run_all(manager: UserBuffers, rows: int) -> None:
    """Every operation of every communicator, at T rows."""
    local, left, right = torch.ones(rows // TP, HIDDEN), torch.ones(rows, 5), torch.ones(5, HIDDEN)
    for communicator in manager.communicators.values():
        if communicator.name.endswith("_fprop") and communicator.spec.is_reduce_scatter:
            communicator.gemm_reduce_scatter(left, right, local.clone())
        elif communicator.spec.method == "ring_exchange":
            communicator.all_gather_gemm(local, right.t(), torch.empty(rows, 5))
        elif communicator.spec.is_reduce_scatter:
            communicator.matrix.fill_(1)
            communicator.start_reduce_scatter(local.clone()).wait()
        else:
            communicator.start_all_gather(local).wait()


def test_one_allocation_for_each_communicator_and_none_afterwards():
    backend = made(table=TABLE)
    manager = UserBuffers(backend)
    allocations, size = len(backend.communicators) + 1, backend.allocated_bytes  # and a token for fences
    assert backend.allocations == allocations
    # Ten of tp chunks, a ring reduce-scatter of 2 tp - 1, and a pipeline of tp + 1.
    chunks = {communicator.name: communicator.buffer.numel() // (CAPACITY // TP * HIDDEN) for communicator in backend.communicators}
    assert chunks.pop("proj_fprop") == 2 * TP - 1 and chunks.pop("fc2_fprop") == TP + 1 and set(chunks.values()) == {TP}
    assert size == 4 + 4 * HIDDEN * CAPACITY // TP * (2 * TP - 1 + TP + 1 + 10 * TP)
    assert size == 4 + sum(communicator.nbytes for communicator in backend.communicators)
    where = [communicator.buffer.data_ptr() for communicator in backend.communicators]
    for rows in (CAPACITY, TP, 40, 16, 92):
        manager.set_active_shape([rows, HIDDEN])
        run_all(manager, rows)
        manager.fence()
    assert where == [communicator.buffer.data_ptr() for communicator in backend.communicators]
    assert (backend.allocations, backend.allocated_bytes) == (allocations, size)


def test_views_are_the_contiguous_prefix_for_the_active_rows():
    manager = UserBuffers(made(table=TABLE))
    for communicator in manager.communicators.values():
        communicator.buffer.copy_(torch.arange(communicator.buffer.numel()))
        for rows in (CAPACITY, 20, TP):
            communicator.set_buffer_active_shape([rows, HIDDEN])
            assert communicator.matrix.shape == (rows, HIDDEN)
            assert torch.equal(communicator.matrix.flatten(), communicator.buffer[: rows * HIDDEN])
            count = communicator.chunks(TP)
            together = torch.cat([communicator._chunk(index) for index in range(count)])
            assert torch.equal(together.flatten(), communicator.buffer[: count * rows // TP * HIDDEN])


@pytest.mark.parametrize("rows", [TP, 20, CAPACITY])
def test_messages_carry_the_active_rows_alone(rows, monkeypatch):
    manager = UserBuffers(made(table=TABLE))
    manager.set_active_shape([rows, HIDDEN])
    messages = Messages(monkeypatch)
    run_all(manager, rows)
    chunk = rows // TP * HIDDEN
    sent = [size for kind, size in messages.sizes if kind == "isend"]
    assert sent == [size for kind, size in messages.sizes if kind == "irecv"] == [chunk] * (TP - 1) * 5  # 4 gathers, proj_fprop
    assert [size for kind, size in messages.sizes if kind == "gather"] == [TP * chunk] * 4  # 2 bulk, 2 external
    assert sorted(size for kind, size in messages.sizes if kind == "reduce-scatter") == [TP * chunk // 2] * 2 + [TP * chunk] * 2


class Storages(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of each storage that an operation makes, whatever makes it."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.made: list[int] = []
        self.alive: list[torch.Tensor] = []  # else an address is used again

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.known.add(tensor.untyped_storage().data_ptr())
                self.made.append(tensor.numel())
                self.alive.append(tensor)
        return result


def test_an_exchange_makes_no_tensor_of_its_own():
    manager = UserBuffers(made(table=TABLE))
    manager.set_active_shape([20, HIDDEN])
    local, left, right, product = torch.ones(5, HIDDEN), torch.ones(20, 5), torch.ones(5, HIDDEN), torch.empty(20, 5)
    known = [local, left, right, product, *(communicator.buffer for communicator in manager.communicators.values())]
    with Storages(*known) as storages:
        manager.get("qkv_fprop").all_gather_gemm(local, right.t(), product)
        manager.get("proj_fprop").gemm_reduce_scatter(left, right, local)
        manager.get("fc2_fprop").gemm_reduce_scatter(left, right, local)
        manager.get("qkv_dgrad").start_all_gather(local).wait()
        manager.get("qkv_wgrad").start_reduce_scatter(local).wait()
        assert storages.made == []
        left.mm(right)  # the mode sees what it should
    assert storages.made == [20 * HIDDEN]


def test_fp8_communicators_hold_bytes_and_refuse_gemms():
    backend = made(modes=(NONE, FP8), dtype=torch.bfloat16, table={"proj_fprop": {"method": "ring_exchange", "fp8_buf": True}})
    manager = UserBuffers(backend)
    types = {c.name: c.dtype for c in backend.communicators if c.quantized}
    wide = {name for name, dtype in types.items() if dtype is torch.bfloat16}
    assert wide == {"fc2_fprop", "qkv_wgrad", "fc1_wgrad"} and set(types.values()) == {torch.bfloat16, torch.uint8}
    assert all(c.dtype is torch.bfloat16 for c in backend.communicators if not c.quantized)
    with pytest.raises(ActiveShapeError, match="multiple of 16"):
        manager.get("qkv_fprop", True).set_buffer_active_shape([32, HIDDEN])
    manager.get("qkv_fprop").set_buffer_active_shape([32, HIDDEN])
    manager.set_active_shape([64, HIDDEN])
    local = torch.ones(16, HIDDEN, dtype=torch.uint8)
    assert manager.get("qkv_fprop", True).gather(local).shape == (64, HIDDEN)
    assert manager.get("qkv_dgrad", True).gather(local).dtype is torch.uint8
    with pytest.raises(ValueError, match="qkv_fprop carries FP8, and the reference backend has no FP8 GEMM.*backend='te'"):
        manager.get("qkv_fprop", True).all_gather_gemm(local, local, local)
    for name in ("proj_fprop", "fc2_fprop"):
        with pytest.raises(ValueError, match=f"{name} carries FP8"):
            manager.get(name, True).gemm_reduce_scatter(local, local, local)


def test_operands_of_another_T_width_or_type_are_refused_before_anything_is_sent(monkeypatch):
    manager = UserBuffers(made(table=TABLE))
    manager.set_active_shape([20, HIDDEN])
    local, left, right = torch.ones(5, HIDDEN), torch.ones(20, 3), torch.ones(3, HIDDEN)
    messages = Messages(monkeypatch)
    ring, bulk, reduce = manager.get("qkv_fprop"), manager.get("qkv_dgrad"), manager.get("qkv_wgrad")
    for wrong in (torch.ones(6, HIDDEN), torch.ones(5, HIDDEN + 1), torch.ones(4, HIDDEN)):
        shown = str(list(wrong.shape)).replace("[", r"\[")
        for call in (
            lambda: ring.all_gather_gemm(wrong, right.t(), torch.empty(20, 3)),
            lambda: bulk.start_all_gather(wrong),
            lambda: reduce.start_reduce_scatter(wrong),
            lambda: manager.get("proj_fprop").gemm_reduce_scatter(left, right, wrong),
            lambda: manager.get("fc2_fprop").gemm_reduce_scatter(left, right, wrong),
        ):
            with pytest.raises(ActiveShapeError, match=rf"active for \[20, 8\] over 4 ranks.*{shown}: peers would wait"):
                call()
    for name in ("proj_fprop", "fc2_fprop"):
        with pytest.raises(ActiveShapeError, match="the left operand must be"):
            manager.get(name).gemm_reduce_scatter(torch.ones(24, 3), right, local)
    with pytest.raises(ActiveShapeError, match="the product must be"):
        ring.all_gather_gemm(local, right.t(), torch.empty(24, 3))
    with pytest.raises(ValueError, match="initialised for torch.float32, but .* is torch.bfloat16"):
        bulk.start_all_gather(local.bfloat16())
    assert messages.sizes == []


def test_a_method_refuses_what_it_is_not_made_for():
    manager = UserBuffers(made())
    local = torch.ones(CAPACITY // TP, HIDDEN)
    for name, call, needed in (
        ("qkv_dgrad", lambda c: c.all_gather_gemm(local, local, local), "bulk, which cannot gather beside its own GEMM.* ring_exchange"),
        ("qkv_fprop", lambda c: c.gemm_reduce_scatter(local, local, local), "cannot reduce-scatter beside its own GEMM.*pipeline"),
        ("qkv_fprop", lambda c: c.start_all_gather(local), "cannot gather beside another GEMM.*bulk"),
        ("proj_fprop", lambda c: c.start_reduce_scatter(local), "cannot reduce-scatter beside another GEMM.*bulk"),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*{needed}"):
            call(manager.get(name))


def test_a_destroyed_communicator_says_so():
    manager = UserBuffers(made())
    kept = manager.get("qkv_dgrad")
    manager.close()
    assert kept.buffer is None
    with pytest.raises(RuntimeError, match=r"qkv_dgrad was destroyed with destroy_ub\(\)"):
        kept.start_all_gather(torch.ones(CAPACITY // TP, HIDDEN))


def test_a_table_that_cannot_work_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "_allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(OverlapConfigError, match="divide the hidden size 8"):
        made(table={"proj_fprop": {"num_splits": 3}})


def test_gloo_with_a_gpu_is_refused_with_the_way_out(monkeypatch):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(device, "compute_device", lambda: torch.device("cuda", 0))
    with pytest.raises(ValueError, match="uses gloo, which sends no tensors of a GPU.* Use NCCL"):
        ReferenceBackend((8, 8), tp_size=1, modes=[NONE], dtype=torch.float32, tables=[None], local_rows=16, tp_group=dist.group.WORLD)
