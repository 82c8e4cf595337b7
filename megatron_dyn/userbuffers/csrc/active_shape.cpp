// SPDX-License-Identifier: Apache-2.0
// Changes the shape in which Transformer Engine's UserBuffer communicators see their registered buffer.
//
// Every overlap derives its views, offsets and counts from the shape of `_ubuf` (and, ring exchange, of the chunks in `_ubufs`). These
// are protected members of public classes, so a derived type may name them. Their shape is set in place; allocation, registration and
// the peers' handles stay as they are. Layout of a buffer of T rows for tp ranks, contiguous from the start of the allocation:
//
//   bulk, pipeline, external     _ubuf [T, hidden]
//   ring-exchange all-gather     _ubuf [T, hidden]                          _ubufs: tp chunks of [T / tp, hidden]
//   ring-exchange reduce-scatter _ubuf [(2 * tp - 1) * T / tp, hidden]      _ubufs: 2 * tp - 1 chunks of [T / tp, hidden]
//
// Host code only; no symbol of CUDA or torch. Transformer Engine's own symbols are those that its Python package has loaded already.

#include <pybind11/pybind11.h>
#include <transformer_engine/comm_gemm_overlap.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef MEGATRON_DYN_BUILT_FOR
#error "compile with -DMEGATRON_DYN_TE_VERSION and -DMEGATRON_DYN_BUILT_FOR, as megatron_dyn/userbuffers/native_build.py does"
#endif

namespace py = pybind11;
namespace te = transformer_engine;

namespace {

// ---- what Transformer Engine keeps protected ----

template <class Base>
struct Access : Base {
  static te::TensorWrapper& buffer(Base& comm) { return comm.*(&Access::_ubuf); }
  static size_t tp_size(Base& comm) { return static_cast<size_t>(comm.*(&Access::_tp_size)); }
  static size_t tp_id(Base& comm) { return static_cast<size_t>(comm.*(&Access::_tp_id)); }
};

struct RingAccess : Access<te::CommOverlapP2PBase> {
  static std::vector<te::TensorWrapper>& chunks(te::CommOverlapP2PBase& comm) { return comm.*(&RingAccess::_ubufs); }
  static int num_chunks(te::CommOverlapP2PBase& comm) { return comm.*(&RingAccess::_num_ubuf_chunks); }
};

template <class T, class = void>
struct HasCublasMp : std::false_type {};
template <class T>
struct HasCublasMp<T, std::void_t<decltype(std::declval<T&>().with_cublasmp())>> : std::true_type {};

template <class T>
bool with_cublasmp(T& comm) {
  if constexpr (HasCublasMp<T>::value) {
    return comm.with_cublasmp();
  } else {  // 2.11 knows nothing of it
    return false;
  }
}

// ---- one communicator ----

struct Communicator {
  te::TensorWrapper* buffer;
  std::vector<te::TensorWrapper>* chunks;  // ring exchange only, else null
  char* data;
  te::DType dtype;
  size_t element_size, tp_size, tp_id, num_chunks, hidden, capacity_rows;

  void set_rows(size_t rows) const {
    if (chunks == nullptr) {
      set(*buffer, data, rows);
      return;
    }
    const size_t chunk_rows = rows / tp_size, chunk_bytes = chunk_rows * hidden * element_size;
    set(*buffer, data, chunk_rows * num_chunks);
    char* start = data;
    for (te::TensorWrapper& chunk : *chunks) {
      set(chunk, start, chunk_rows);
      start += chunk_bytes;
    }
  }

  void set(te::TensorWrapper& tensor, void* start, size_t rows) const {
    NVTEShape shape{};  // not a std::vector: nothing is allocated here
    shape.data[0] = rows;
    shape.data[1] = hidden;
    shape.ndim = 2;
    tensor.set_rowwise_data(start, dtype, shape);
  }

  size_t rows() const { return chunks == nullptr ? buffer->size(0) : buffer->size(0) / num_chunks * tp_size; }
};

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error("Transformer Engine " MEGATRON_DYN_TE_VERSION ": " + what);
}

template <class Base>
Communicator describe(Base& comm) {
  if (with_cublasmp(comm)) {
    refuse("this communicator was made with cuBLASMp: it has no buffer, and takes its sizes from its operands, so there "
           "is no shape to set.");
  }
  te::TensorWrapper& buffer = Access<Base>::buffer(comm);
  if (buffer.dptr() == nullptr || buffer.ndim() != 2 || buffer.numel() == 0) {
    refuse("this communicator has no two-dimensional buffer, so its shape cannot be changed.");
  }
  Communicator c{};
  c.buffer = &buffer;
  c.data = static_cast<char*>(buffer.dptr());
  c.dtype = buffer.dtype();
  c.element_size = buffer.element_size();
  c.tp_size = Access<Base>::tp_size(comm);
  c.tp_id = Access<Base>::tp_id(comm);
  c.num_chunks = 1;
  c.hidden = buffer.size(1);
  c.capacity_rows = buffer.size(0);
  if (c.tp_size == 0 || c.tp_id >= c.tp_size) {
    refuse("this communicator says that it is rank " + std::to_string(c.tp_id) + " of " + std::to_string(c.tp_size) + ".");
  }
  return c;
}

// ---- those of one manager ----

class ActiveShapes {
 public:
  size_t add_bulk(te::CommOverlapBase& comm) {
    const Communicator c = describe(comm);
    if (c.capacity_rows % c.tp_size != 0) {
      refuse("the buffer has " + std::to_string(c.capacity_rows) + " rows, which " + std::to_string(c.tp_size) + " ranks cannot share.");
    }
    return add(c);
  }

  size_t add_ring(te::CommOverlapP2PBase& comm) {
    Communicator c = describe(comm);
    c.chunks = &RingAccess::chunks(comm);
    c.num_chunks = c.chunks->size();
    const bool known = c.num_chunks == c.tp_size || c.num_chunks == 2 * c.tp_size - 1;
    if (!known || static_cast<int>(c.num_chunks) != RingAccess::num_chunks(comm) || c.capacity_rows % c.num_chunks != 0) {
      refuse("a ring exchange of " + std::to_string(c.tp_size) + " ranks over " + std::to_string(c.capacity_rows) + " rows in " +
             std::to_string(c.num_chunks) + " chunks is not laid out as in the versions that are known.");
    }
    c.capacity_rows = c.capacity_rows / c.num_chunks * c.tp_size;
    return add(c);
  }

  void set_rows(size_t rows) {
    check(rows, max_rows_, multiple_);
    for (const Communicator& c : communicators_) c.set_rows(rows);
  }

  void set_rows_of(size_t index, size_t rows) {
    const Communicator& c = at(index);
    check(rows, c.capacity_rows, c.tp_size);
    c.set_rows(rows);
  }

  std::pair<size_t, size_t> shape(size_t index) const {
    const Communicator& c = at(index);
    return {c.rows(), c.buffer->size(1)};
  }

  py::dict layout(size_t index) const {
    const Communicator& c = at(index);
    py::dict found;
    found["dptr"] = reinterpret_cast<uintptr_t>(c.buffer->dptr());
    found["element_size"] = c.buffer->element_size();
    found["tp_size"] = c.tp_size;
    found["tp_id"] = c.tp_id;
    found["chunks"] = c.num_chunks;
    found["rows"] = c.rows();
    found["buffer_rows"] = c.buffer->size(0);
    found["hidden"] = c.buffer->size(1);
    found["capacity_rows"] = c.capacity_rows;
    found["capacity_bytes"] = c.capacity_rows / c.tp_size * (c.chunks ? c.num_chunks : c.tp_size) * c.hidden * c.element_size;
    py::list chunk_layout;
    if (c.chunks != nullptr) {
      for (te::TensorWrapper& chunk : *c.chunks) {
        const auto offset = static_cast<int64_t>(static_cast<char*>(chunk.dptr()) - c.data);
        chunk_layout.append(py::make_tuple(offset, chunk.size(0), chunk.size(1)));
      }
    }
    found["chunk_layout"] = chunk_layout;
    return found;
  }

  size_t size() const { return communicators_.size(); }

 private:
  size_t add(const Communicator& c) {
    communicators_.push_back(c);
    max_rows_ = communicators_.size() == 1 ? c.capacity_rows : std::min(max_rows_, c.capacity_rows);
    multiple_ = std::lcm(multiple_, c.tp_size);
    return communicators_.size() - 1;
  }

  const Communicator& at(size_t index) const {
    if (index >= communicators_.size()) {
      throw std::out_of_range("communicator " + std::to_string(index) + " of " + std::to_string(communicators_.size()));
    }
    return communicators_[index];
  }

  // The last line of defence; what users read is said in Python (megatron_dyn/userbuffers/shape.py).
  static void check(size_t rows, size_t capacity, size_t multiple) {
    if (rows != 0 && rows <= capacity && rows % multiple == 0) return;
    throw std::invalid_argument(std::to_string(rows) + " rows: a buffer of " + std::to_string(capacity) +
                                " rows takes a multiple of " + std::to_string(multiple) + " up to that; nothing was changed");
  }

  std::vector<Communicator> communicators_;
  size_t max_rows_ = 0, multiple_ = 1;
};

void fence(te::CommOverlapBase& comm, uintptr_t stream) {
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  comm.bulk_overlap_external_ag(on, on, on);
}

// Found by reading the file, so that a module built for other versions need not be loaded to be refused.
__attribute__((used)) const char built_for[] = MEGATRON_DYN_BUILT_FOR;

}  // namespace

// The arguments name exactly CommOverlapBase and CommOverlapP2PBase. Transformer Engine registers these for its own module alone; pybind11
// still hands them over to another module, but only under the first base of the communicator's Python class.
PYBIND11_MODULE(_active_shape, m) {
  py::class_<ActiveShapes>(m, "ActiveShapes")
      .def(py::init<>())
      .def("add_bulk", &ActiveShapes::add_bulk, py::arg("comm"), py::keep_alive<1, 2>())
      .def("add_ring", &ActiveShapes::add_ring, py::arg("comm"), py::keep_alive<1, 2>())
      .def("set_rows", &ActiveShapes::set_rows, py::arg("rows"))
      .def("set_rows_of", &ActiveShapes::set_rows_of, py::arg("index"), py::arg("rows"))
      .def("shape", [](const ActiveShapes& self, size_t index) {
        const auto shape = self.shape(index);
        return py::make_tuple(shape.first, shape.second);
      }, py::arg("index"))
      .def("layout", &ActiveShapes::layout, py::arg("index"))
      .def("__len__", &ActiveShapes::size);
  m.def("fence", &fence, py::arg("comm"), py::arg("stream"));
  m.def("te_version", [] { return std::string(MEGATRON_DYN_TE_VERSION); });
  m.def("built_for", [] { return std::string(built_for); });
}
