// A device whose work is late: an accelerator for tests, on the host, with streams, events, pinned memory and NCCL-like groups.
//
// Tensors keep their data on the host, and every operation runs the CPU's kernel. What is like a GPU:
// - An operation is queued on the current stream, and returns. It runs when the host waits for it, when something that waits
//   for it runs, or by chance (seeded): so what does not wait reads memory that is not written yet. Nothing depends on how
//   fast the machine is.
// - Freed memory is overwritten in the order of the stream it was allocated on, unless `record_stream` was called.
// - Copies between pinned memory and the device are queued too if non_blocking, and read and write it when they run.
// - A collective runs on its group's own stream, after what the current stream has queued; `wait()` makes the current
//   stream wait and not the host. Ranks talk over gloo.
// Beside it, every access to memory is held against all earlier ones by vector clocks (Lamport 1978; as in torch's CUDA Stream
// Sanitizer and in ThreadSanitizer): two accesses of which one writes, on two streams, with no event between them, are a race,
// whether numbers came out wrong or not.

#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/Generator.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>

namespace {

constexpr auto LATE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;
using Clock = std::vector<int64_t>; // how much of each lane (a stream, by number) is known to be over

// ------------------------------------------------------------------------------------------------- streams and what they queue

struct Item {
  int64_t serial;
  Clock needs;
  std::function<void()> work;
  std::function<bool()> ready; // of what waits for another rank: whether it would return at once
  std::string name;
};

struct Access {
  const char *from, *to;
  int lane;
  int64_t at;
  bool writes;
  std::string name;
};

struct Block {
  char* address;
  size_t bytes;
  int owner; // lane it was allocated on; -1 for pinned host memory
  std::set<int> recorded;
  std::vector<Access> accesses;
};

struct Lane {
  std::deque<Item> queue;
  int64_t queued = 0, done = 0;
  Clock clock;
  std::vector<Block> freed, reused; // memory that was allocated here: see `overwrite`
};

struct Freed {
  Block block;
  int64_t serial;
};

std::recursive_mutex mutex;

// The device's lock, waited for without the interpreter's: torch.Event.query and others keep that, and a thread that has the
// device's may wait for gloo, whose own thread needs the interpreter's to let hooks of saved tensors go (it runs under the
// state of the thread that launched). CUDA calls Python under none of its locks.
struct Guard {
  Guard() {
    if (mutex.try_lock()) return;
    if (PyGILState_Check()) {
      pybind11::gil_scoped_release released;
      mutex.lock();
    } else {
      mutex.lock();
    }
  }
  Guard(const Guard&) = delete;
  ~Guard() {
    mutex.unlock();
  }
};

std::mutex freeing; // apart, since memory is freed while the interpreter's lock is held
std::deque<Lane> lanes(DEVICES); // the first are default streams
Clock host;
std::map<const char*, Block> blocks;
std::vector<char*> to_free;
std::vector<Freed> graveyard;
std::vector<std::string> races, failures;
std::mt19937_64 dice(0);
double eager = 1.0; // how often something that is queued is run by chance; 1: everything at once
int64_t serial = 0, operations = 0, host_waits = 0;
thread_local int current_device = 0;
thread_local std::array<int, DEVICES> current_lane = {0, 1, 2, 3, 4, 5, 6, 7};

int64_t at_lane(const Clock& clock, size_t lane) {
  return lane < clock.size() ? clock[lane] : 0;
}

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

int lane_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

c10::Stream stream_of(int lane, c10::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device, lane < DEVICES ? 0 : lane);
}

int here() {
  return current_lane[current_device];
}

// Kernels of the CPU see no modes, no autograd and nothing else of the thread that happens to run them.
struct Plain {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet({c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView}),
      c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

// Runs a lane up to a place, with all that it waits for. by_chance: stops where it would wait for another rank.
bool run_until(int which, int64_t place, bool by_chance) {
  Lane& lane = lanes[which];
  if (lane.done < place && dice() % 4) {
    // What other streams owe the last of it comes first if that may be: it need not wait for what this stream has before.
    Clock needs = lane.queue[static_cast<size_t>(place - lane.done - 1)].needs;
    for (size_t other = 0; other < needs.size(); ++other) {
      if (static_cast<int>(other) != which && !run_until(static_cast<int>(other), needs[other], by_chance)) return false;
    }
  }
  while (lane.done < place) {
    Item& next = lane.queue.front();
    if (by_chance && next.ready && !next.ready()) return false;
    for (size_t other = 0; other < next.needs.size(); ++other) {
      if (static_cast<int>(other) != which && next.needs[other] > lanes[other].done &&
          !run_until(static_cast<int>(other), next.needs[other], by_chance))
        return false;
    }
    Item item = std::move(lane.queue.front());
    lane.queue.pop_front();
    try {
      Plain plain;
      item.work();
    } catch (const c10::Error& error) {
      failures.push_back(item.name + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      failures.push_back(item.name + ": " + error.what());
    }
    ++lane.done;
  }
  return true;
}

void bury() { // frees memory that nothing queued can touch any more
  int64_t oldest = serial + 1;
  for (auto& lane : lanes)
    if (!lane.queue.empty()) oldest = std::min(oldest, lane.queue.front().serial);
  size_t kept = 0;
  for (auto& freed : graveyard) {
    if (freed.serial < oldest) {
      std::free(freed.block.address);
    } else {
      graveyard[kept++] = std::move(freed);
    }
  }
  graveyard.resize(kept);
}

void host_waits_for(const Clock& clock) {
  ++host_waits;
  for (size_t lane = 0; lane < clock.size(); ++lane) run_until(static_cast<int>(lane), clock[lane], false);
  join(host, clock);
  bury();
  if (!failures.empty()) {
    auto text = failures.front();
    failures.clear();
    TORCH_CHECK(false, "late: a queued operation failed: ", text);
  }
}

// ------------------------------------------------------------------------------------------------------------ who touches what

struct Range {
  const char *from, *to;
};

Range range_of(const at::Tensor& tensor) {
  auto* base = static_cast<const char*>(tensor.unsafeGetTensorImpl()->storage().data());
  int64_t last = tensor.storage_offset();
  if (tensor.numel() == 0) return {base, base};
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto size = static_cast<int64_t>(tensor.itemsize());
  return {base + tensor.storage_offset() * size, base + (last + 1) * size};
}

Block* block_of(const char* address) {
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  --it;
  return address < it->second.address + std::max<size_t>(it->second.bytes, 1) ? &it->second : nullptr;
}

void report(const std::string& text) {
  if (races.size() < 100) races.push_back(text);
}

void touch(const Range& range, int lane, int64_t at, bool writes, const std::string& name) {
  Block* block = range.from == range.to ? nullptr : block_of(range.from);
  if (!block) return;
  const Clock& clock = lanes[lane].clock;
  auto& accesses = block->accesses;
  size_t kept = 0;
  for (auto& access : accesses) {
    bool over = at_lane(host, access.lane) >= access.at;
    bool before = over || access.lane == lane || at_lane(clock, access.lane) >= access.at;
    bool meet = access.from < range.to && range.from < access.to;
    if (meet && !before && (writes || access.writes)) {
      std::ostringstream text;
      text << name << " on stream " << lane << (writes ? " writes what " : " reads what ") << access.name << " on stream "
           << access.lane << (access.writes ? " writes" : " reads") << ", and no event orders them ("
           << (block->owner < 0 ? "pinned, " : "") << block->bytes << " bytes)";
      report(text.str());
    }
    bool covered = range.from <= access.from && access.to <= range.to && before && (writes || !access.writes);
    if (!over && !covered) {
      if (&accesses[kept] != &access) accesses[kept] = std::move(access);
      ++kept;
    }
  }
  accesses.resize(kept);
  accesses.push_back({range.from, range.to, lane, at, writes, name});
}

void perhaps_run() {
  std::uniform_real_distribution<double> chance(0.0, 1.0);
  if (chance(dice) >= eager) return;
  int which = static_cast<int>(dice() % lanes.size());
  Lane& lane = lanes[which];
  if (lane.queue.empty()) return;
  run_until(which, lane.done + 1 + static_cast<int64_t>(dice() % lane.queue.size()), true);
}

void take_freed();
void overwrite(int which);

int64_t enqueue(
    int which, const std::string& name, const std::vector<Range>& reads, const std::vector<Range>& writes,
    std::function<void()> work, std::function<bool()> ready = nullptr) {
  take_freed();
  ++operations;
  Lane& lane = lanes[which];
  join(lane.clock, host);
  if (lane.clock.size() <= static_cast<size_t>(which)) lane.clock.resize(which + 1, 0);
  overwrite(which);
  int64_t at = lane.clock[which] = ++lane.queued;
  for (auto& range : reads) touch(range, which, at, false, name);
  for (auto& range : writes) touch(range, which, at, true, name);
  lane.queue.push_back({++serial, lane.clock, std::move(work), std::move(ready), name});
  if (eager >= 1.0) {
    run_until(which, at, true);
  } else {
    perhaps_run();
  }
  return at;
}

// Memory goes back to the stream it came from: what that stream allocates next may be it, and what it queues then may
// overwrite it. So it is overwritten with the first operation after the next allocation.
void take_freed() {
  std::vector<char*> taken;
  {
    std::lock_guard<std::mutex> lock(freeing);
    taken.swap(to_free);
  }
  for (char* address : taken) {
    auto it = blocks.find(address);
    if (it == blocks.end()) continue;
    Block block = std::move(it->second);
    blocks.erase(it);
    // What `record_stream` was called on waits for the streams that it names, so nobody can see when it is used again.
    if (block.owner >= 0 && block.recorded.empty()) {
      lanes[block.owner].freed.push_back(std::move(block));
    } else {
      graveyard.push_back({std::move(block), ++serial});
    }
  }
  if (graveyard.size() > 4096) bury();
}

void overwrite(int which) {
  Lane& lane = lanes[which];
  auto reused = std::move(lane.reused);
  lane.reused.clear();
  for (auto& block : reused) {
    for (auto& access : block.accesses) {
      if (access.lane == which || at_lane(lane.clock, access.lane) >= access.at) continue;
      std::ostringstream text;
      text << "memory of stream " << which << " was freed while " << access.name << " on stream " << access.lane << " may still "
           << (access.writes ? "write" : "read") << " it (" << block.bytes << " bytes)";
      report(text.str());
    }
    lane.clock[which] = ++lane.queued;
    auto* address = block.address;
    auto bytes = block.bytes;
    lane.queue.push_back({++serial, lane.clock, [address, bytes] { std::memset(address, 0xFF, bytes); }, nullptr, "free"});
    graveyard.push_back({std::move(block), ++serial});
  }
}

// -------------------------------------------------------------------------------------------------------------------- memory

void give_back(void* address) {
  std::lock_guard<std::mutex> lock(freeing);
  to_free.push_back(static_cast<char*>(address));
}

c10::DataPtr take(size_t bytes, int owner, c10::Device device) {
  Guard lock;
  take_freed();
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, 64, std::max<size_t>(bytes, 64)) == 0, "late: no memory for ", bytes, " bytes");
  std::memset(address, 0xFF, std::max<size_t>(bytes, 64)); // NaN, or -1
  auto* start = static_cast<char*>(address);
  blocks[start] = Block{start, bytes, owner, {}, {}};
  if (owner >= 0) {
    auto& lane = lanes[owner];
    // It may be memory that kernels of this stream, which are queued, still use: who else writes it has to wait for them.
    blocks[start].accesses.push_back({start, start + bytes, owner, lane.queued, true, "(what had this memory before)"});
    for (auto& block : lane.freed) lane.reused.push_back(std::move(block));
    lane.freed.clear();
  }
  return {address, address, give_back, device};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return take(bytes, here(), c10::Device(LATE, current_device));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return give_back;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return take(bytes, -1, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return give_back;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

Memory memory;
Pinned pinned;

// ------------------------------------------------------------------------------------------------ what torch asks of a device

struct Moment {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Device final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return LATE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {LATE, static_cast<c10::DeviceIndex>(current_device)};
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device whole(c10::Device device) const {
    return device.has_index() ? device : getDevice();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_lane[whole(device).index()], whole(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(whole(device).index(), whole(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Guard lock;
    lanes.emplace_back();
    return stream_of(static_cast<int>(lanes.size()) - 1, whole(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_lane[stream.device_index()] = lane_of(stream);
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Guard lock;
    take_freed();
    if (*event == nullptr) *event = new Moment;
    auto& lane = lanes[lane_of(stream)];
    join(lane.clock, host);
    *static_cast<Moment*>(*event) = {lane.clock, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Guard lock;
    take_freed();
    join(lanes[lane_of(stream)].clock, static_cast<Moment*>(event)->clock);
  }
  bool query(const Clock& clock) const {
    bool over = true, tried = dice() % 8 == 0;
    for (size_t lane = 0; lane < clock.size(); ++lane)
      over = over && (lanes[lane].done >= clock[lane] || (tried && run_until(static_cast<int>(lane), clock[lane], true)));
    if (over) join(host, clock);
    return over;
  }
  bool queryEvent(void* event) const override {
    Guard lock;
    return event == nullptr || query(static_cast<Moment*>(event)->clock);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Guard lock;
    return query(lanes[lane_of(stream)].clock);
  }
  void synchronizeEvent(void* event) const override {
    Guard lock;
    if (event != nullptr) host_waits_for(static_cast<Moment*>(event)->clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Guard lock;
    host_waits_for(lanes[lane_of(stream)].clock);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Guard lock;
    take_freed();
    Clock all;
    for (auto& lane : lanes) all.push_back(lane.queued);
    host_waits_for(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    Guard lock;
    if (auto* block = block_of(static_cast<const char*>(pointer.get()))) block->recorded.insert(lane_of(stream));
  }
  double elapsedTime(void* one, void* other, const c10::DeviceIndex) const override {
    auto span = static_cast<Moment*>(other)->time - static_cast<Moment*>(one)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
};

struct Random final : c10::GeneratorImpl {
  at::Generator inner;
  Random(int index, at::Generator from)
      : c10::GeneratorImpl(c10::Device(LATE, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(from)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return const_cast<at::Generator&>(inner).seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Random* clone_impl() const override {
    return new Random(device().index(), inner.clone());
  }
};

const at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; ++i) made.push_back(at::make_generator<Random>(i, at::detail::createCPUGenerator()));
    return made;
  }();
  return all[index < 0 ? current_device : index];
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto before = storage.nbytes();
  auto next = memory.allocate(bytes);
  auto *from = static_cast<char*>(storage.mutable_data()), *to = static_cast<char*>(next.get());
  auto common = std::min(before, bytes);
  if (common) {
    Guard lock;
    enqueue(here(), "resize", {{from, from + common}}, {{to, to + common}}, [=] { std::memcpy(to, from, common); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(next));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(device < 0 ? current_device : device, at::detail::createCPUGenerator());
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {LATE, static_cast<c10::DeviceIndex>(current_device)};
  }
  bool isPinnedPtr(const void* data) const override {
    Guard lock;
    auto* block = block_of(static_cast<const char*>(data));
    return block && block->owner < 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

// ---------------------------------------------------------------------------------------------------------------- operations

bool late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == LATE;
}

// The same bytes as a tensor of the CPU, which does not keep them alive.
at::Tensor on_host(const at::Tensor& tensor) {
  auto* from = tensor.unsafeGetTensorImpl();
  auto& storage = from->storage();
  auto* data = const_cast<void*>(storage.data());
  c10::Storage bytes(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::kCPU), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), from->dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (from->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(
      sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// What the host must know the values for, as on a GPU.
const std::set<std::string> NEEDS_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::_assert_async"};
const std::set<std::string> TAKES_INDICES_OF_THE_HOST = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl", "aten::index_put"};

using Change = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue map(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) made.push_back(change(each));
    return made;
  }
  if (value.isList() && value.toListRef().size() &&
      value.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) {
    auto element = value.type()->castRaw<c10::ListType>()->getElementType()->castRaw<c10::OptionalType>()->getElementType();
    if (element->kind() != c10::TypeKind::TensorType) return value;
    c10::List<std::optional<at::Tensor>> made;
    for (const c10::IValue& each : value.toListRef()) {
      if (each.isNone() || !each.toTensor().defined()) {
        made.push_back(std::nullopt);
      } else {
        made.push_back(change(each.toTensor()));
      }
    }
    return made;
  }
  if (value.isDevice()) return value.toDevice().type() == LATE ? c10::IValue(c10::Device(c10::kCPU)) : value;
  if (value.isGenerator() && value.toGenerator().device().type() == LATE)
    return static_cast<Random*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
  return value;
}

struct Made { // a new tensor of an operation, known by its shape
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool defined;
};

std::map<std::string, std::vector<Made>> shapes; // of operations whose returns are new tensors alone

void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - static_cast<int64_t>(count), stack->end());
  stack->erase(stack->end() - static_cast<int64_t>(count), stack->end());
  int device = -1;
  std::vector<Range> reads, writes;
  std::vector<c10::IValue> there;
  std::vector<at::Tensor> tensors;
  bool masks = false, random = op.hasTag(at::Tag::nondeterministic_seeded);
  std::ostringstream key;
  key << name << '.' << schema.overload_name();
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    key << ';';
    if (given[i].isNone() && argument.type()->str() == "Generator?" && random) {
      there.push_back(static_cast<Random*>(default_generator(current_device).unsafeGetGeneratorImpl())->inner);
      continue;
    }
    bool seen = false;
    there.push_back(map(given[i], [&](const at::Tensor& tensor) -> at::Tensor {
      seen = true;
      key << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (!late(tensor)) {
        TORCH_CHECK(
            tensor.dim() == 0 || TAKES_INDICES_OF_THE_HOST.count(name) || tensor.numel() == 0,
            "late: ", name, " got a tensor of ", tensor.sizes(), " on ", tensor.device(), " among tensors of the device");
        auto copy = tensor.clone();
        copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        return copy;
      }
      masks = masks || ((tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) && name == "aten::index" && i == 1);
      device = tensor.device().index();
      (written ? writes : reads).push_back(range_of(tensor));
      tensors.push_back(tensor);
      return on_host(tensor);
    }));
    if (!seen && !given[i].isGenerator()) key << given[i];
  }
  if (device < 0) device = current_device;
  Guard lock;
  const int lane = current_lane[device];
  bool fresh = false; // whether a return is a new tensor, or a view
  for (const auto& ret : schema.returns()) fresh = fresh || !ret.alias_info() || !ret.alias_info()->isWrite();
  std::vector<size_t> unsized; // arguments that the operation gives its size to
  for (size_t i = 0; i < count && !fresh && !random; ++i) {
    if (schema.arguments()[i].is_out() && given[i].isTensor() && given[i].toTensor().numel() == 0) unsized.push_back(i);
  }
  if (auto known = shapes.find(key.str()); !unsized.empty() && known != shapes.end()) {
    for (size_t i = 0; i < unsized.size(); ++i) {
      auto out = given[unsized[i]].toTensor();
      out.resize_(known->second[i].sizes);
      there[unsized[i]] = on_host(out);
      writes.push_back(range_of(out));
    }
    unsized.clear();
  }
  if (!unsized.empty()) {
    for (auto i : unsized) {
      Plain plain;
      there[i] = at::Tensor(at::detail::empty_cpu({0}, at::TensorOptions(given[i].toTensor().scalar_type())));
    }
    int64_t at = enqueue(lane, name, reads, writes, [] {});
    run_until(lane, at, false);
    {
      Plain plain;
      call(op, there);
    }
    std::vector<Made> made;
    for (size_t i = 0; i < unsized.size(); ++i) {
      auto out = given[unsized[i]].toTensor();
      auto value = there[i].toTensor(); // what it returned
      out.resize_(value.sizes());
      Plain plain;
      on_host(out).copy_(value);
      made.push_back({value.sizes().vec(), value.strides().vec(), value.scalar_type(), true});
    }
    shapes.emplace(key.str(), std::move(made));
  } else if (!fresh && !random) {
    enqueue(lane, name, reads, writes, [op, there]() mutable { call(op, there); });
  }
  std::vector<c10::IValue> results;
  bool values = NEEDS_VALUES.count(name) || masks;
  auto at_once = [&] { // in the order of the stream, but now
    int64_t at = enqueue(lane, name, reads, writes, [] {});
    run_until(lane, at, false);
    if (values) host_waits_for(lanes[lane].clock);
    Plain plain;
    auto arguments = there;
    call(op, arguments);
    return arguments;
  };
  if (!fresh && random) at_once();
  if (fresh) {
    auto known = shapes.find(key.str());
    if (known != shapes.end() && !random && !values) {
      auto outs = std::make_shared<std::vector<at::Tensor>>();
      for (auto& each : known->second) {
        if (!each.defined) {
          results.emplace_back(at::Tensor());
          outs->emplace_back();
          continue;
        }
        auto out = make(each.sizes, each.strides, each.dtype);
        writes.push_back(range_of(out));
        outs->push_back(on_host(out));
        results.emplace_back(out);
      }
      enqueue(lane, name, reads, writes, [op, there, outs, name]() mutable {
        call(op, there);
        for (size_t i = 0; i < outs->size(); ++i) {
          if (!(*outs)[i].defined()) continue;
          auto made = there[i].toTensor();
          TORCH_CHECK(made.sizes() == (*outs)[i].sizes(), name, " has the shape ", made.sizes(), ", not ", (*outs)[i].sizes());
          (*outs)[i].copy_(made);
        }
      });
    } else {
      // The first call of its kind runs at once and shows the shapes; later ones are queued.
      auto returned = at_once();
      bool plain = !random && !values;
      std::vector<Made> made;
      for (size_t i = 0; i < returned.size(); ++i) {
        const auto& ret = schema.returns()[i];
        if (ret.alias_info() && ret.alias_info()->isWrite()) plain = false;
        plain = plain && returned[i].isTensor();
        results.push_back(map(returned[i], [&](const at::Tensor& value) -> at::Tensor {
          for (auto& tensor : tensors) { // a view
            if (value.storage().data() == tensor.storage().data() && value.storage().data() && value.scalar_type() == tensor.scalar_type()) {
              plain = false;
              return at::native::as_strided_tensorimpl(tensor, value.sizes(), value.strides(), value.storage_offset());
            }
          }
          auto out = make(value.sizes(), value.strides(), value.scalar_type());
          Plain kernels;
          on_host(out).copy_(value);
          return out;
        }));
        if (plain && returned[i].toTensor().defined()) {
          auto value = returned[i].toTensor();
          made.push_back({value.sizes().vec(), value.strides().vec(), value.scalar_type(), true});
        } else if (plain) {
          made.push_back({{}, {}, at::kFloat, false});
        }
      }
      if (plain) shapes.emplace(key.str(), std::move(made));
    }
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& ret = schema.returns()[i];
    if (!ret.alias_info() || !ret.alias_info()->isWrite()) {
      stack->push_back(results[i]);
      continue;
    }
    for (size_t j = 0; j < count; ++j) {
      const auto* alias = schema.arguments()[j].alias_info();
      if (alias && alias->beforeSets() == ret.alias_info()->beforeSets()) {
        stack->push_back(given[j]);
        break;
      }
    }
  }
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return make(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> whole;
  if (offset) whole = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), whole);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto bytes = static_cast<size_t>((impl->numel() + impl->storage_offset()) * static_cast<int64_t>(self.itemsize()));
  if (bytes > impl->storage().nbytes()) resize_bytes(impl->storage(), bytes);
  return self;
}

at::Tensor& set_place_(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage_(at::Tensor& self, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::cpu::set_(self, storage, 0, {count}, {1});
}

at::Tensor& set_source_(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  bool crosses = late(self) != late(source);
  Guard lock;
  const int lane = current_lane[late(self) ? self.device().index() : source.device().index()];
  const at::Tensor& on_cpu = late(self) ? source : self;
  Block* block = crosses && on_cpu.numel() ? block_of(range_of(on_cpu).from) : nullptr;
  bool pageable = crosses && !(block && block->owner < 0);
  bool staged = pageable && late(self);
  auto from = staged ? source.clone() : on_host(source), to = on_host(self);
  std::vector<Range> reads, writes{range_of(self)};
  if (!staged) reads.push_back(range_of(source));
  const char* name = !crosses ? "copy_" : late(self) ? "copy_ to the device" : "copy_ to the host";
  enqueue(lane, name, reads, writes, [from, to] { to.copy_(from); });
  if (crosses && (!non_blocking || (pageable && late(source)))) host_waits_for(lanes[lane].clock);
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& self, bool non_blocking) {
  auto to = self;
  return copy_(to, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& self) {
  self.resize_(source.sizes());
  return copy_from(source, self, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  Guard lock;
  int lane = current_lane[self.device().index()];
  enqueue(lane, "item", {range_of(self)}, {}, [] {});
  host_waits_for(lanes[lane].clock);
  Plain plain;
  return on_host(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard lock;
  if (auto* block = block_of(static_cast<const char*>(self.storage().data()))) block->recorded.insert(lane_of(stream));
}

bool compatible(const at::Tensor&, const at::Tensor&) { // `param.data = param.data.to(device)`, as between CPU and CUDA
  return true;
}

int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0; // plain operators
}

// ----------------------------------------------------------------------------------------------------------------- collectives

struct Late final : c10d::Work {
  Late(c10d::OpType type, std::vector<at::Tensor> outputs, int lane, Clock clock)
      : c10d::Work(-1, type), outputs_(std::move(outputs)), lane_(lane), clock_(std::move(clock)) {}
  bool isCompleted() override {
    Guard lock;
    return at_lane(clock_, lane_) <= lanes[lane_].done;
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    Guard lock;
    take_freed();
    join(lanes[here()].clock, clock_);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(LATE, current_device)});
    synchronize();
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  std::vector<at::Tensor> outputs_; // kept until the work is let go, as NCCL's does
  int lane_;
  Clock clock_;
};

using Tensors = std::vector<at::Tensor>;
using Started = c10::intrusive_ptr<c10d::Work>;

struct Group final : c10d::Backend {
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    Guard lock;
    lanes.emplace_back();
    lane_ = static_cast<int>(lanes.size()) - 1;
  }
  const std::string getBackendName() const override {
    return "late";
  }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }

  // Runs what was queued elsewhere before this moment, and of this group what writes these ranges: no more, since what is
  // before in the group may wait for another rank, which may wait for what is started now.
  void finish_for(const std::vector<Range>& ranges) {
    Clock before = lanes[lane_].clock;
    for (size_t other = 0; other < before.size(); ++other)
      if (static_cast<int>(other) != lane_) run_until(static_cast<int>(other), before[other], false);
    int64_t last = 0;
    for (auto& range : ranges) {
      Block* block = range.from == range.to ? nullptr : block_of(range.from);
      if (!block) continue;
      for (auto& access : block->accesses)
        if (access.lane == lane_ && access.writes && access.from < range.to && range.from < access.to)
          last = std::max(last, access.at);
    }
    run_until(lane_, last, false);
  }

  // Starts `start` on copies of the inputs, and queues the copy to the outputs.
  Started launch(
      c10d::OpType type, const std::string& name, const Tensors& inputs, const Tensors& outputs,
      const std::function<Started(Tensors&, Tensors&)>& start, double scale = 1.0) {
    Guard lock;
    take_freed();
    for (auto* all : {&inputs, &outputs})
      for (auto& each : *all) TORCH_CHECK(late(each), "late: ", name, " got a tensor on ", each.device());
    Lane& lane = lanes[lane_];
    join(lane.clock, lanes[here()].clock);
    join(lane.clock, host);
    std::vector<Range> reads, writes;
    for (auto& each : inputs) reads.push_back(range_of(each));
    for (auto& each : outputs) writes.push_back(range_of(each));
    if (!inputs.empty()) finish_for(reads); // gloo reads at once
    auto ins = std::make_shared<Tensors>(), outs = std::make_shared<Tensors>();
    const bool in_place = &inputs == &outputs;
    Started work;
    std::vector<at::Tensor> targets;
    {
      Plain plain;
      for (auto& each : inputs) ins->push_back(on_host(each).clone(at::MemoryFormat::Contiguous));
      for (auto& each : outputs) targets.push_back(on_host(each));
      for (size_t i = 0; i < targets.size(); ++i)
        outs->push_back(in_place ? (*ins)[i] : at::empty_like(targets[i], at::MemoryFormat::Contiguous));
      work = start(*ins, *outs);
    }
    enqueue(
        lane_, name, reads, writes,
        [=] {
          if (work) work->wait();
          for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(scale == 1.0 ? (*outs)[i] : (*outs)[i] * scale);
          ins->clear();
        },
        [work] { return !work || work->isCompleted(); });
    // NCCL's work keeps its tensors until it is waited for; so does this one.
    Tensors kept(inputs);
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<Late>(type, outputs.empty() ? kept : outputs, lane_, lane.clock);
  }

  // gloo knows no averages.
  std::pair<c10d::ReduceOp, double> summed(const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::AVG) return {c10d::ReduceOp::SUM, 1.0 / getSize()};
    return {op, 1.0};
  }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(c10d::OpType::BROADCAST, "broadcast", tensors, tensors, [=](Tensors&, Tensors& outs) {
      return gloo_->broadcast(outs, options);
    });
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto [op, scale] = summed(options.reduceOp);
    auto changed = options;
    changed.reduceOp = op;
    return launch(
        c10d::OpType::ALLREDUCE, "all_reduce", tensors, tensors,
        [=](Tensors&, Tensors& outs) { return gloo_->allreduce(outs, changed); }, scale);
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto [op, scale] = summed(options.reduceOp);
    auto changed = options;
    changed.reduceOp = op;
    return launch(
        c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, tensors,
        [=](Tensors&, Tensors& outs) { return gloo_->allreduce_coalesced(outs, changed); }, scale);
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(c10d::OpType::REDUCE, "reduce", tensors, tensors, [=](Tensors&, Tensors& outs) {
      return gloo_->reduce(outs, options);
    });
  }
  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::ALLGATHER, "all_gather", inputs, outputs[0], [=](Tensors& ins, Tensors& outs) {
      std::vector<Tensors> lists{outs};
      return gloo_->allgather(lists, ins, options);
    });
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, "all_gather", {input}, {output}, [=](Tensors& ins, Tensors& outs) {
      return gloo_->_allgather_base(outs[0], ins[0], options);
    });
  }
  Started allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch(c10d::OpType::COALESCED, "all_gather", inputs, outputs, [=](Tensors& ins, Tensors& outs) {
      return gloo_->allgather_into_tensor_coalesced(outs, ins, options);
    });
  }
  Started gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return launch(c10d::OpType::GATHER, "gather", inputs, outputs.empty() ? Tensors{} : outputs[0], [=](Tensors& ins, Tensors& outs) {
      std::vector<Tensors> lists;
      if (!outs.empty()) lists.push_back(outs);
      return gloo_->gather(lists, ins, options);
    });
  }
  Started scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return launch(c10d::OpType::SCATTER, "scatter", inputs.empty() ? Tensors{} : inputs[0], outputs, [=](Tensors& ins, Tensors& outs) {
      std::vector<Tensors> lists;
      if (!ins.empty()) lists.push_back(ins);
      return gloo_->scatter(outs, lists, options);
    });
  }
  Started reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [op, scale] = summed(options.reduceOp);
    auto changed = options;
    changed.reduceOp = op;
    return launch(
        c10d::OpType::REDUCE_SCATTER, "reduce_scatter", inputs[0], outputs,
        [=](Tensors& ins, Tensors& outs) {
          std::vector<Tensors> lists{ins};
          return gloo_->reduce_scatter(outs, lists, changed);
        },
        scale);
  }
  Started _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto [op, scale] = summed(options.reduceOp);
    auto changed = options;
    changed.reduceOp = op;
    return launch(
        c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {input}, {output},
        [=](Tensors& ins, Tensors& outs) { return gloo_->_reduce_scatter_base(outs[0], ins[0], changed); }, scale);
  }
  Started reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [op, scale] = summed(options.reduceOp);
    auto changed = options;
    changed.reduceOp = op;
    return launch(
        c10d::OpType::COALESCED, "reduce_scatter", inputs, outputs,
        [=](Tensors& ins, Tensors& outs) { return gloo_->reduce_scatter_tensor_coalesced(outs, ins, changed); }, scale);
  }
  Started alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    return launch(c10d::OpType::ALLTOALL_BASE, "all_to_all", {input}, {output}, [=](Tensors& ins, Tensors& outs) {
      auto to = out_sizes, from = in_sizes;
      return gloo_->alltoall_base(outs[0], ins[0], to, from, options);
    });
  }
  Started send(Tensors& tensors, int to, int tag) override {
    return launch(c10d::OpType::SEND, "send", tensors, {}, [=](Tensors& ins, Tensors&) { return gloo_->send(ins, to, tag); });
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    return launch(c10d::OpType::RECV, "recv", {}, tensors, [=](Tensors&, Tensors& outs) { return gloo_->recv(outs, from, tag); });
  }
  Started recvAnysource(Tensors& tensors, int tag) override {
    return launch(c10d::OpType::RECVANYSOURCE, "recv", {}, tensors, [=](Tensors&, Tensors& outs) {
      return gloo_->recvAnysource(outs, tag);
    });
  }
  Started barrier(const c10d::BarrierOptions&) override { // the host waits, as on NCCL
    {
      Guard lock;
      host_waits_for(lanes[here()].clock);
    }
    c10d::BarrierOptions plain;
    auto work = gloo_->barrier(plain);
    work->wait();
    return c10::make_intrusive<Late>(c10d::OpType::BARRIER, Tensors{}, lane_, Clock{});
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  int lane_;
};

// --------------------------------------------------------------------------------------------------------------- registration

Device device_guard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, Device);
REGISTER_ALLOCATOR(LATE, &memory);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_place_);
  m.impl("set_.source_Storage", &set_storage_);
  m.impl("set_.source_Tensor", &set_source_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_has_compatible_shallow_copy_type", &compatible);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &sdp_choice);
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
} // namespace at::native

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.attr("DEVICES") = DEVICES;
  m.def("configure", [](double by_chance, uint64_t seed) {
    Guard lock;
    eager = by_chance;
    dice.seed(seed);
  });
  m.def("races", [] {
    Guard lock;
    take_freed();
    std::vector<std::string> taken;
    taken.swap(races);
    return taken;
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("counts", [] { return std::make_tuple(operations, host_waits); });
  m.def("register_host", [](int64_t address, int64_t bytes) {
    Guard lock;
    auto* start = reinterpret_cast<char*>(address);
    blocks[start] = Block{start, static_cast<size_t>(bytes), -1, {}, {}};
  });
  m.def(
      "unregister_host",
      [](int64_t address) {
        Guard lock;
        device_guard.synchronizeDevice(0);
        blocks.erase(reinterpret_cast<char*>(address));
      },
      py::call_guard<py::gil_scoped_release>());
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group").def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
