# SPDX-License-Identifier: Apache-2.0
"""The compiled extension on communicators that stand in for Transformer Engine's: run as a program, once for each version.

    python native_checks.py EXTENSION STAND_IN          prints {check: "passed" or a traceback} as JSON

Each version's stand-in defines the same symbols for the whole process, so each needs a process of its own.
"""

import importlib.util
import json
import os
import sys
import traceback
from types import SimpleNamespace

from megatron_dyn.userbuffers import native

BYTE, BFLOAT16 = 0, 6  # Transformer Engine's numbers for them
STAND_INS = SimpleNamespace()


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bulk(rows=64, hidden=8, dtype=BFLOAT16, tp_size=4, tp_id=1):
    return STAND_INS.te.CommOverlap(rows=rows, hidden=hidden, dtype=dtype, tp_size=tp_size, tp_id=tp_id)


def ring(rows=64, hidden=8, dtype=BFLOAT16, tp_size=4, tp_id=1, reduce_scatter=False, chunks=None):
    chunks = chunks or (2 * tp_size - 1 if reduce_scatter else tp_size)
    return STAND_INS.te.CommOverlapP2P(rows=rows, hidden=hidden, dtype=dtype, tp_size=tp_size, tp_id=tp_id, chunks=chunks)


def refused(call, *arguments, error, says=()):
    try:
        call(*arguments)
    except error as caught:
        assert type(caught) is error, type(caught)
        for part in says:
            assert part in str(caught), str(caught)
        return str(caught)
    raise AssertionError(f"{call.__name__}{arguments} was not refused")


def check_a_bulk_buffer_keeps_its_address_and_shrinks_and_grows():
    shapes, comm = STAND_INS.extension.ActiveShapes(), bulk()
    start = comm.get_buffer().data_ptr()
    assert shapes.add_bulk(comm) == 0 and len(shapes) == 1
    for rows in (64, 4, 32, 60, 64):
        shapes.set_rows(rows)
        whole, local = comm.get_buffer(), comm.get_buffer(local_chunk=True)
        assert (whole.data_ptr(), whole.shape) == (start, [rows, 8])
        assert (local.data_ptr(), local.shape) == (start + rows // 4 * 8 * 2, [rows // 4, 8])
        assert shapes.shape(0) == (rows, 8)


def check_ring_chunks_are_contiguous_whole_rows_inside_the_allocation():
    for reduce_scatter, chunks in ((False, 4), (True, 7)):
        for dtype, element_size in ((BFLOAT16, 2), (BYTE, 1)):
            shapes, comm = STAND_INS.extension.ActiveShapes(), ring(reduce_scatter=reduce_scatter, dtype=dtype)
            start = comm.get_buffer().data_ptr()
            shapes.add_ring(comm)
            for rows in (64, 4, 32, 60, 64):
                shapes.set_rows(rows)
                part = rows // 4
                assert comm.get_buffer().shape == [part * chunks, 8]
                assert comm.get_buffer(local_chunk=True, shape=[part, 8]).data_ptr() == start + part * 8 * element_size
                assert shapes.shape(0) == (rows, 8)
                layout = shapes.layout(0)
                assert layout["chunk_layout"] == [(i * part * 8 * element_size, part, 8) for i in range(chunks)]
                assert layout["dptr"] == start and layout["capacity_bytes"] == 16 * chunks * 8 * element_size
                offset, last_rows, hidden = layout["chunk_layout"][-1]
                assert offset + last_rows * hidden * element_size <= layout["capacity_bytes"]


def check_one_call_sets_all_and_each_keeps_its_own_width():
    shapes = STAND_INS.extension.ActiveShapes()
    bytes_ = dict(dtype=BYTE)
    comms = [bulk(hidden=8), ring(hidden=16, reduce_scatter=True), ring(rows=128, hidden=4, **bytes_), bulk(rows=96, hidden=2, **bytes_)]
    for comm in comms:
        (shapes.add_ring if "P2P" in type(comm).__name__ else shapes.add_bulk)(comm)
    shapes.set_rows(20)
    assert [shapes.shape(i) for i in range(4)] == [(20, 8), (20, 16), (20, 4), (20, 2)]
    shapes.set_rows_of(2, 128)
    assert [shapes.shape(i)[0] for i in range(4)] == [20, 20, 128, 20]


def check_the_layout_says_what_was_registered():
    shapes = STAND_INS.extension.ActiveShapes()
    comm = bulk(rows=48, tp_size=3, tp_id=2)
    shapes.add_bulk(comm)
    shapes.set_rows(9)
    layout = shapes.layout(0)
    assert layout == {
        "dptr": comm.get_buffer().data_ptr(), "element_size": 2, "tp_size": 3, "tp_id": 2, "chunks": 1, "rows": 9, "buffer_rows": 9,
        "hidden": 8, "capacity_rows": 48, "capacity_bytes": 48 * 8 * 2, "chunk_layout": [],
    }  # fmt: skip
    shapes.add_ring(ring(rows=48, tp_size=3, tp_id=2, reduce_scatter=True))
    shapes.set_rows(9)
    layout = shapes.layout(1)
    assert (layout["chunks"], layout["rows"], layout["buffer_rows"], layout["capacity_rows"]) == (5, 9, 15, 48)


def check_refusals_leave_every_shape_as_it_was():
    shapes = STAND_INS.extension.ActiveShapes()
    shapes.add_bulk(bulk(rows=64))
    shapes.add_ring(ring(rows=32, reduce_scatter=True))
    shapes.set_rows(20)
    for rows in (0, 36, 64, 2**63, 21, 22, 23):
        refused(shapes.set_rows, rows, error=ValueError, says=[str(rows), "32", "nothing was changed"])
    for index, rows in ((0, 68), (0, 0), (0, 63), (1, 36), (1, 6)):
        refused(shapes.set_rows_of, index, rows, error=ValueError)
    for rows in (-4, 4.0, "4", None):
        refused(shapes.set_rows, rows, error=TypeError)
    refused(shapes.set_rows_of, 2, 4, error=IndexError, says=["2 of 2"])
    refused(shapes.shape, 2, error=IndexError)
    refused(shapes.layout, 7, error=IndexError)
    assert [shapes.shape(i)[0] for i in range(2)] == [20, 20]


def check_ranks_of_different_groups_divide_the_rows_together():
    shapes = STAND_INS.extension.ActiveShapes()
    shapes.add_bulk(bulk(rows=60, tp_size=4))
    shapes.add_bulk(bulk(rows=60, tp_size=6))
    refused(shapes.set_rows, 28, error=ValueError, says=["multiple of 12"])
    shapes.set_rows(36)


def check_the_wrong_kind_is_refused():
    shapes = STAND_INS.extension.ActiveShapes()
    refused(shapes.add_bulk, ring(), error=TypeError)
    refused(shapes.add_ring, bulk(), error=TypeError)
    refused(shapes.add_bulk, None, error=TypeError)
    refused(shapes.add_bulk, bulk(rows=0), error=RuntimeError, says=["no two-dimensional buffer"])
    refused(shapes.add_bulk, bulk(rows=62), error=RuntimeError, says=["62 rows"])
    refused(shapes.add_ring, ring(chunks=5), error=RuntimeError, says=["5 chunks"])
    assert len(shapes) == 0


def check_a_communicator_of_cublasmp_is_refused():
    if not STAND_INS.te.knows_cublasmp:
        refused(bulk().make_cublasmp, error=RuntimeError)  # TE 2.11 has no such thing; nothing to refuse
        return
    shapes = STAND_INS.extension.ActiveShapes()
    for comm, add in ((bulk(), shapes.add_bulk), (ring(), shapes.add_ring)):
        comm.make_cublasmp()
        refused(add, comm, error=RuntimeError, says=["cuBLASMp", STAND_INS.extension.te_version()])
    assert len(shapes) == 0


def check_communicators_live_as_long_as_the_shapes():
    shapes = STAND_INS.extension.ActiveShapes()
    comm = bulk()
    before = sys.getrefcount(comm)
    shapes.add_bulk(comm)
    assert sys.getrefcount(comm) == before + 1
    del shapes
    assert sys.getrefcount(comm) == before


def check_no_tensor_is_made_after_the_communicators():
    shapes = STAND_INS.extension.ActiveShapes()
    for comm in [bulk() for _ in range(4)]:
        shapes.add_bulk(comm)
    for comm in [ring(reduce_scatter=i % 2 == 0) for i in range(8)]:
        shapes.add_ring(comm)
    made = STAND_INS.te.tensors_made()
    for rows in (4, 64, 8) * 100:
        shapes.set_rows(rows)
    assert STAND_INS.te.tensors_made() == made


def check_the_fence_is_one_exchange_on_the_given_stream():
    before = STAND_INS.te.fences()[0]
    STAND_INS.extension.fence(bulk(rows=4), 0xABC0)
    STAND_INS.extension.fence(comm=bulk(rows=4), stream=0)
    assert STAND_INS.te.fences() == (before + 2, 0, 0, 0)
    STAND_INS.extension.fence(bulk(rows=4), 0xABC0)
    assert STAND_INS.te.fences() == (before + 3, 0xABC0, 0xABC0, 0xABC0)
    refused(STAND_INS.extension.fence, ring(), 0, error=TypeError)


def check_the_probe_accepts_every_kind_and_leaves_the_shape():
    for tp_size in (1, 2, 4):
        shapes = STAND_INS.extension.ActiveShapes()
        kinds = dict(tp_size=tp_size, tp_id=tp_size - 1)
        comms = [bulk(**kinds), ring(**kinds), ring(reduce_scatter=True, **kinds), bulk(dtype=BYTE, **kinds), ring(rows=tp_size, **kinds)]
        for comm in comms:
            (shapes.add_ring if "P2P" in type(comm).__name__ else shapes.add_bulk)(comm)
        shapes.set_rows(tp_size)
        for index, comm in enumerate(comms):
            for rows in (tp_size, shapes.layout(index)["capacity_rows"]):
                shapes.set_rows_of(index, rows)
                native.check_layout(shapes, index, comm)
                assert shapes.shape(index)[0] == rows


def check_the_probe_refuses_another_layout():
    """Mutants of Transformer Engine: a chunk elsewhere, another buffer, one that does not follow a new shape."""
    version = STAND_INS.extension.te_version()
    shapes, comm = STAND_INS.extension.ActiveShapes(), ring()
    shapes.add_ring(comm)
    comm.misplace_chunk(2, 16)
    refused(native.check_layout, shapes, 0, comm, error=native.LayoutMismatchError, says=[version, "chunks", "64 rows", "reference"])

    shapes, comm = STAND_INS.extension.ActiveShapes(), bulk()
    shapes.add_bulk(comm)
    refused(native.check_layout, shapes, 0, bulk(), error=native.LayoutMismatchError, says=["address"])
    refused(native.check_layout, shapes, 0, bulk(rows=60), error=native.LayoutMismatchError, says=["shape", "60, 8"])
    narrow = SimpleNamespace(get_buffer=lambda **how: _changed(comm.get_buffer(**how), element_size=1))
    refused(native.check_layout, shapes, 0, narrow, error=native.LayoutMismatchError, says=["element size"])
    frozen = {how: comm.get_buffer(local_chunk=how) for how in (False, True)}
    stuck = SimpleNamespace(get_buffer=lambda local_chunk, shape=None: frozen[local_chunk])
    refused(native.check_layout, shapes, 0, stuck, error=native.LayoutMismatchError, says=["32 rows", "[64, 8]"])
    assert shapes.shape(0) == (64, 8)


def _changed(buffer, **changes):
    values = {"data_ptr": buffer.data_ptr(), "element_size": buffer.element_size(), **changes}
    return SimpleNamespace(shape=buffer.shape, **{name: (lambda value=value: value) for name, value in values.items()})


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


def main(extension, stand_in):
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)  # as Transformer Engine loads its library
    STAND_INS.te = _load("stand_in_te", stand_in)
    sys.setdlopenflags(flags)
    STAND_INS.extension = sys.modules[native.MODULE] = _load(native.MODULE, extension)
    outcomes = {}
    for name in CHECKS:
        try:
            globals()[name]()
            outcomes[name] = "passed"
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps({"te_version": STAND_INS.extension.te_version(), "outcomes": outcomes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
