// A pretended `cuda` device. Its tensors say that they are on it, lie in the memory of the CPU, and are computed by the
// kernels of the CPU. It refuses what the real one refuses, and a value out of range ends its use, as on the real one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <set>
#include <string>

namespace {

const c10::Device kDevice(c10::kCUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

bool dead = false;      // after a value out of range
bool pending = false;   // whether an operation was started since the last time that somebody waited for the device
at::Generator& generator() {
  static auto found = at::detail::createCPUGenerator(0);
  return found;
}

// ---- what torch asks a device

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(c10::kCUDA); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
};

// ---- memory: a storage of the one device stands for the same bytes as a storage of the other

void release(void* held) { delete static_cast<c10::Storage*>(held); }

c10::DataPtr same_bytes(const c10::Storage& storage, c10::Device device) {
  return {storage.mutable_data(), new c10::Storage(storage), &release, device};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = c10::GetAllocator(c10::kCPU);
    return same_bytes(c10::Storage(c10::Storage::use_byte_size_t(), bytes, cpu, false), kDevice);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;

c10::Storage on(c10::Device device, const c10::Storage& storage) {
  auto* allocator = c10::GetAllocator(device.type());
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), same_bytes(storage, device), allocator, true};
}

at::Tensor made(const c10::Storage& storage, const at::Tensor& like, c10::Device device) {
  const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto found = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return found;
}

// ---- one operation: its tensors as those of the CPU, its kernel, and what it gives as tensors of the device

struct Call {
  std::map<c10::StorageImpl*, c10::Storage> here, there;  // storages of the CPU and of the device, by the other one's
  std::map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> given;  // a tensor of the CPU, and the device's for it
  bool on_device = false, on_cpu = false, mixed = false;  // what the arguments are
  bool wants_cpu = false;                                 // a device was named: that of the CPU

  at::Tensor in(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      mixed |= t.dim() > 0;
      return t;
    }
    TORCH_CHECK(t.layout() == c10::kStrided, "The pretended device has dense tensors only.");
    on_device = true;
    auto& cpu = here[t.storage().unsafeGetStorageImpl()];
    if (!cpu) cpu = on(c10::kCPU, t.storage());
    there[cpu.unsafeGetStorageImpl()] = t.storage();
    auto alias = made(cpu, t, c10::kCPU);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    given[alias.unsafeGetTensorImpl()] = {alias, t};
    return alias;
  }

  at::Tensor out(const at::Tensor& t) {
    if (!t.defined() || wants_cpu) return t;
    if (auto known = given.find(t.unsafeGetTensorImpl()); known != given.end())
      return known->second.second;
    auto view = there.find(t.storage().unsafeGetStorageImpl());
    return made(view == there.end() ? on(kDevice, t.storage()) : view->second, t, kDevice);
  }

  void argument(c10::IValue& value) {
    if (value.isTensor()) {
      value = in(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(in(t));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        list.push_back(t ? std::optional(in(*t)) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice()) {
      wants_cpu = value.toDevice().is_cpu();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      const auto device = value.toGenerator().device();
      TORCH_CHECK(!device.is_cpu(), "Expected a 'cuda' device type for generator but found '", device, "'");
    }
  }

  void result(c10::IValue& value) {
    if (value.isTensor()) {
      value = out(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(out(t));
      value = std::move(list);
    }
  }

  // What an operation resized or moved is so on the device, too.
  void put_back() {
    for (auto& [storage, cpu] : here)
      if (cpu.mutable_data() != storage->mutable_data() || cpu.nbytes() != storage->nbytes()) {
        storage->set_data_ptr_noswap(same_bytes(cpu, kDevice));
        storage->set_nbytes(cpu.nbytes());
      }
    for (auto& [impl, pair] : given) {
      const auto& [alias, t] = pair;
      if (alias.sizes() != t.sizes() || alias.strides() != t.strides() || alias.storage_offset() != t.storage_offset())
        t.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

// Of an operation that finds a value out of range, the real device says so later, and then of every other one.
bool is_assert(const std::string& what) {
  for (const char* part : {"out of bounds", "out of range", "between 0 and 1"})
    if (what.find(part) != std::string::npos && what.find("Dimension") == std::string::npos) return true;
  return false;
}

void require_alive() {
  if (dead) C10_THROW_ERROR(Error, "CUDA error: device-side assert triggered");
}

const std::set<std::string> kMixing = {"aten::copy_", "aten::_foreach_copy_", "aten::index",
                                       "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
                                       "aten::_index_put_impl_", "aten::set_"};

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  require_alive();
  const auto name = op.schema().name();
  Call call;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++) call.argument((*stack)[i]);
  TORCH_CHECK(!(call.mixed && call.on_device) || kMixing.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name,
              ")");
  auto cpu = at::detail::getDefaultCPUGenerator();
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  const auto before = draws ? cpu.get_state() : at::Tensor();
  if (draws) cpu.set_state(generator().get_state());
  auto put_back = [&] {
    if (draws) {
      generator().set_state(cpu.get_state());
      cpu.set_state(before);
    }
  };
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (const c10::Error& error) {
    put_back();
    if (call.on_device && is_assert(error.what_without_backtrace())) {
      dead = true;
      require_alive();
    }
    throw;
  }
  put_back();
  pending = true;
  call.put_back();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) call.result((*stack)[i]);
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {
struct Given {
  Given() {
    c10::SetAllocator(c10::kCUDA, &memory);
    CUDAHooksRegistry()->Register("CUDAHooks", [](CUDAHooksArgs) { return std::unique_ptr<CUDAHooksInterface>(new Hooks); });
  }
} given;
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

// A kernel that the CPU lacks.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& x, const at::Tensor& h, const at::Tensor& c,
                                                         const std::optional<at::Tensor>& b_x,
                                                         const std::optional<at::Tensor>& b_h) {
  auto gates = x.add(h);
  if (b_x && b_h) gates = gates.add(*b_x).add(*b_h);
  const auto parts = gates.chunk(4, 1);
  auto after = parts[1].sigmoid().mul(c).add(parts[0].sigmoid().mul(parts[2].tanh()));
  return {parts[3].sigmoid().mul(after.tanh()), after, gates};
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("_thnn_fused_lstm_cell", &lstm_cell); }

at::Tensor& set(at::Tensor& t, c10::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

// These would choose a kernel by the device. The CPU's choice is taken.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("set_.source_Storage_storage_offset", &set);
  for (const char* name : {"convolution", "convolution_backward", "copy_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY(pretended, m) {
  m.def("seed(int seed) -> ()", [](int64_t seed) { generator().set_current_seed(seed); });
  m.def("state() -> Tensor", [] { return generator().get_state(); });
  m.def("set_state(Tensor state) -> ()", [](const at::Tensor& state) { generator().set_state(state); });
  m.def("wait() -> ()", [] {
    require_alive();
    pending = false;
  });
  m.def("pending() -> bool", [] { return pending; });
  m.def("dead() -> bool", [] { return dead; });
}
