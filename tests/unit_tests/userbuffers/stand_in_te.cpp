// SPDX-License-Identifier: Apache-2.0
// Stands in for Transformer Engine's library and Python module, compiled against its own headers, for a machine without a GPU.
//
// The classes are those of the headers; here are the symbols that they leave to the library, over host memory. The communicators are laid
// out by arithmetic of its own, and tell what they hold the way `get_buffer` of Transformer Engine does: from the shapes in `_ubuf` and
// `_ubufs`, which the extension is meant to change.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <transformer_engine/comm_gemm_overlap.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

namespace py = pybind11;
namespace te = transformer_engine;

// ---- tensors ----

namespace {
struct Tensor {
  void* data = nullptr;
  NVTEDType dtype = kNVTEFloat32;
  std::vector<size_t> shape;
};
int64_t tensors_made = 0, fences = 0;
uintptr_t fence_streams[3];

Tensor& of(NVTETensor tensor) { return *reinterpret_cast<Tensor*>(tensor); }
void set(NVTETensor tensor, NVTETensorParam param, const NVTEBasicTensor& value) {
  if (param != kNVTERowwiseData) return;
  of(tensor).data = value.data_ptr;
  of(tensor).dtype = value.dtype;
  of(tensor).shape.assign(value.shape.data, value.shape.data + value.shape.ndim);
}
}  // namespace

extern "C" {
NVTETensor nvte_create_tensor(NVTEScalingMode) {
  ++tensors_made;
  return reinterpret_cast<NVTETensor>(new Tensor);
}
void nvte_destroy_tensor(NVTETensor tensor) { delete reinterpret_cast<Tensor*>(tensor); }
void nvte_set_tensor_param(NVTETensor* tensor, NVTETensorParam param, const NVTEBasicTensor* value) { set(*tensor, param, *value); }
void nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam param, const void* value, size_t) {
  set(tensor, param, *static_cast<const NVTEBasicTensor*>(value));
}
NVTEShape nvte_make_shape(const size_t* data, size_t ndim) {
  NVTEShape shape{};
  std::copy(data, data + ndim, shape.data);
  shape.ndim = ndim;
  return shape;
}
void* nvte_tensor_data(const NVTETensor tensor) { return of(tensor).data; }
NVTEDType nvte_tensor_type(const NVTETensor tensor) { return of(tensor).dtype; }
size_t nvte_tensor_ndims(const NVTETensor tensor) { return of(tensor).shape.size(); }
size_t nvte_tensor_size(const NVTETensor tensor, const size_t dim) { return of(tensor).shape.at(dim); }
size_t nvte_tensor_numel(const NVTETensor tensor) {
  size_t product = 1;
  for (size_t size : of(tensor).shape) product *= size;
  return product;
}
size_t nvte_tensor_element_size(const NVTETensor tensor) {
  switch (of(tensor).dtype) {
    case kNVTEByte: return 1;
    case kNVTEBFloat16: return 2;
    default: return 4;
  }
}
}

// ---- what the headers leave to the library ----

#define GEMM_ARGUMENTS const te::TensorWrapper&, bool, const te::TensorWrapper&, bool, te::TensorWrapper&, te::TensorWrapper&, \
                       te::TensorWrapper&, te::TensorWrapper&, bool, bool, bool
#define NOT_HERE { throw std::logic_error("only its layout stands in"); }

namespace transformer_engine {
CommOverlapCore::~CommOverlapCore() {}
CommOverlapBase::~CommOverlapBase() {}
CommOverlapP2PBase::~CommOverlapP2PBase() {}
void CommOverlapBase::bulk_overlap(GEMM_ARGUMENTS, CommOverlapType, TensorWrapper&, cudaStream_t) NOT_HERE
void CommOverlapBase::atomic_gemm_overlap_rs(GEMM_ARGUMENTS, TensorWrapper&, cudaStream_t) NOT_HERE
void CommOverlapBase::split_overlap_rs(GEMM_ARGUMENTS, TensorWrapper&, cudaStream_t) NOT_HERE
void CommOverlapBase::bulk_overlap_external_ag(cudaStream_t send, cudaStream_t receive, cudaStream_t main) {
  ++fences;
  fence_streams[0] = reinterpret_cast<uintptr_t>(send);
  fence_streams[1] = reinterpret_cast<uintptr_t>(receive);
  fence_streams[2] = reinterpret_cast<uintptr_t>(main);
}
void CommOverlapP2PBase::copy_into_buffer(cudaStream_t, const TensorWrapper&, bool, bool) NOT_HERE
void CommOverlapP2PBase::atomic_gemm_overlap_ag(GEMM_ARGUMENTS, TensorWrapper&, cudaStream_t) NOT_HERE
void CommOverlapP2PBase::split_overlap_ag(GEMM_ARGUMENTS, TensorWrapper&, cudaStream_t) NOT_HERE
void CommOverlapP2PBase::atomic_gemm_overlap_rs(GEMM_ARGUMENTS, TensorWrapper&, cudaStream_t) NOT_HERE
void CommOverlapP2PBase::split_overlap_rs(GEMM_ARGUMENTS, TensorWrapper&, cudaStream_t) NOT_HERE
}  // namespace transformer_engine

// ---- the Python side of it ----

namespace {
using Shape = std::vector<size_t>;

struct Buffer {  // what a torch tensor over the buffer would say
  uintptr_t address;
  Shape shape;
  size_t element_size;
};

template <class T, class = void>
struct Cublasmp {
  static void mark(T&) { throw std::logic_error("this version knows no cuBLASMp"); }
  static constexpr bool known = false;
};
template <class T>
struct Cublasmp<T, std::void_t<decltype(std::declval<T&>().with_cublasmp())>> {
  struct Access : T {
    static bool& flag(T& comm) { return comm.*(&Access::_with_cublasmp); }
  };
  static void mark(T& comm) { Access::flag(comm) = true; }
  static constexpr bool known = true;
};

Buffer checked(uintptr_t address, const Shape& own, std::optional<Shape> wanted, size_t held, size_t element_size) {
  const Shape shape = wanted.value_or(own);
  if (wanted && shape.at(0) * shape.at(1) != held) throw std::runtime_error("Invalid shape for a Userbuffers buffer");
  return {address, shape, element_size};
}

class CommOverlap : public te::CommOverlapBase {
 public:
  CommOverlap(size_t rows, size_t hidden, int dtype, int tp_size, int tp_id) {
    _tp_size = tp_size;
    _tp_id = tp_id;
    const auto type = static_cast<te::DType>(dtype);
    if (rows != 0) {
      memory_.resize(rows * hidden * 4);
      _ubuf = te::TensorWrapper(memory_.data(), Shape{rows, hidden}, type);
    }
  }
  Buffer get_buffer(bool local_chunk, std::optional<Shape> shape) {
    const size_t part = local_chunk ? _tp_size : 1, held = _ubuf.numel() / part;
    const size_t offset = local_chunk ? held * _tp_id * _ubuf.element_size() : 0;
    const uintptr_t address = reinterpret_cast<uintptr_t>(_ubuf.dptr()) + offset;
    return checked(address, {_ubuf.size(0) / part, _ubuf.size(1)}, shape, held, _ubuf.element_size());
  }

 private:
  std::vector<char> memory_;
};

class CommOverlapP2P : public te::CommOverlapP2PBase {
 public:
  CommOverlapP2P(size_t rows, size_t hidden, int dtype, int tp_size, int tp_id, int chunks) {
    _tp_size = tp_size;
    _tp_id = tp_id;
    _num_ubuf_chunks = chunks;
    const auto type = static_cast<te::DType>(dtype);
    const size_t chunk_rows = rows / tp_size;
    memory_.resize(chunk_rows * chunks * hidden * 4);
    _ubuf = te::TensorWrapper(memory_.data(), Shape{chunk_rows * chunks, hidden}, type);
    const size_t chunk_bytes = chunk_rows * hidden * _ubuf.element_size();
    for (int i = 0; i < chunks; ++i) _ubufs.emplace_back(memory_.data() + i * chunk_bytes, Shape{chunk_rows, hidden}, type);
  }
  Buffer get_buffer(bool local_chunk, std::optional<Shape> shape) {
    te::TensorWrapper& part = local_chunk ? _ubufs[_tp_id] : _ubuf;
    const size_t parts = local_chunk ? _tp_size : 1;
    const uintptr_t address = reinterpret_cast<uintptr_t>(part.dptr());
    return checked(address, {_ubuf.size(0) / parts, _ubuf.size(1)}, shape, part.numel(), _ubuf.element_size());
  }
  void misplace_chunk(int index, size_t bytes) {  // as a version with another layout would
    te::TensorWrapper& chunk = _ubufs.at(index);
    const Shape shape{chunk.size(0), chunk.size(1)};
    chunk.set_rowwise_data(static_cast<char*>(chunk.dptr()) + bytes, chunk.dtype(), shape);
  }

 private:
  std::vector<char> memory_;
};
}  // namespace

PYBIND11_MODULE(stand_in_te, m) {
  py::class_<te::CommOverlapCore, std::shared_ptr<te::CommOverlapCore>>(m, "CommOverlapCore", py::module_local());
  py::class_<te::CommOverlapBase, std::shared_ptr<te::CommOverlapBase>, te::CommOverlapCore>(m, "CommOverlapBase", py::module_local());
  py::class_<te::CommOverlapP2PBase, std::shared_ptr<te::CommOverlapP2PBase>, te::CommOverlapCore>(m, "CommOverlapP2PBase",
                                                                                                         py::module_local());
  py::class_<Buffer>(m, "Buffer")
      .def("data_ptr", [](const Buffer& b) { return b.address; })
      .def("element_size", [](const Buffer& b) { return b.element_size; })
      .def_readonly("shape", &Buffer::shape);
  py::class_<CommOverlap, std::shared_ptr<CommOverlap>, te::CommOverlapBase, te::CommOverlapCore>(m, "CommOverlap")
      .def(py::init<size_t, size_t, int, int, int>(), py::arg("rows"), py::arg("hidden"), py::arg("dtype"), py::arg("tp_size"),
           py::arg("tp_id"))
      .def("make_cublasmp", [](CommOverlap& comm) { Cublasmp<te::CommOverlapBase>::mark(comm); })
      .def("get_buffer", &CommOverlap::get_buffer, py::arg("local_chunk") = false, py::arg("shape") = std::nullopt);
  py::class_<CommOverlapP2P, std::shared_ptr<CommOverlapP2P>, te::CommOverlapP2PBase, te::CommOverlapCore>(m, "CommOverlapP2P")
      .def(py::init<size_t, size_t, int, int, int, int>(), py::arg("rows"), py::arg("hidden"), py::arg("dtype"), py::arg("tp_size"),
           py::arg("tp_id"), py::arg("chunks"))
      .def("make_cublasmp", [](CommOverlapP2P& comm) { Cublasmp<te::CommOverlapP2PBase>::mark(comm); })
      .def("misplace_chunk", &CommOverlapP2P::misplace_chunk)
      .def("get_buffer", &CommOverlapP2P::get_buffer, py::arg("local_chunk") = false, py::arg("shape") = std::nullopt);
  m.attr("knows_cublasmp") = Cublasmp<te::CommOverlapBase>::known;
  m.def("tensors_made", [] { return tensors_made; });
  m.def("fences", [] { return py::make_tuple(fences, fence_streams[0], fence_streams[1], fence_streams[2]); });
}
