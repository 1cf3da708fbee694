// The threads of a threadgroup as stacks of their own, between which one thread of the processor switches.
#include "scheduler.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

using namespace metal_sim::abi;

// Saves the callee-saved registers and the stack pointer, and resumes another stack.
extern "C" void metal_sim_switch(void** save, void* load);
#if defined(__x86_64__)
__asm__(R"(
.text
.globl metal_sim_switch
.hidden metal_sim_switch
.type metal_sim_switch, @function
metal_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size metal_sim_switch, .-metal_sim_switch
)");
static constexpr size_t frame_words = 8, return_word = 6;  // the word above the return address aligns the stack
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl metal_sim_switch
.hidden metal_sim_switch
.type metal_sim_switch, %function
metal_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size metal_sim_switch, .-metal_sim_switch
)");
static constexpr size_t frame_words = 20, return_word = 11;
#else
#error "metal_sim knows x86-64 and aarch64"
#endif

namespace metal_sim {
namespace {

struct Fiber {
  void* stack_pointer = nullptr;
  std::byte* top = nullptr;
};

enum class Status : uint8_t { ready, in_simdgroup, at_barrier, done };

struct ThreadRecord : Thread {
  Fiber* fiber;
  Status status;
  Op op;
  uint64_t site;
};

struct SimdgroupRecord : Simdgroup {
  ThreadRecord* threads;  // the first of them
  uint32_t width;
  uint32_t ready;     // by rank
  uint32_t arrived;   // how many wait for the others of the simdgroup
  uint8_t order[32];  // lane of each rank
  uint8_t rank[32];   // rank of each lane
};

struct Scheduler {
  ThreadRecord threads[max_threads_per_threadgroup];
  SimdgroupRecord simdgroups[max_threads_per_threadgroup / simdgroup_width];
  Fiber fibers[max_threads_per_threadgroup];
  Fiber* free_fibers[max_threads_per_threadgroup];
  size_t free_count = 0;
  std::byte* stacks = nullptr;

  State* state = nullptr;
  void (*entry)() = nullptr;
  Order::Kind order = Order::Kind::forward;
  Random* random = nullptr;
  Costs* costs = nullptr;
  ThreadRecord* current = nullptr;
  uint32_t simdgroup_count = 0;
  uint32_t ready_simdgroups = 0;  // those with a ready thread
  uint32_t remaining = 0;         // threads that have not returned
  uint32_t at_barrier = 0;
  uint64_t barrier_site = 0;
  uint32_t barrier_flags = 0;
  void* host = nullptr;  // the host's stack while a fiber runs
  volatile sig_atomic_t in_kernel = 0;
  volatile sig_atomic_t out_of_time = 0;
  bool failed = false;
  Failure failure;
};
Scheduler s;

uint32_t line_of(uint64_t site) { return uint32_t(site >> 32); }

const char* op_name(Op op) {
  switch (op) {
    case Op::simdgroup_barrier:
      return "simdgroup_barrier";
    case Op::threadgroup_barrier:
      return "threadgroup_barrier";
    case Op::simd_reduce:
      return "simd reduction";
    case Op::simd_scan:
      return "simd prefix sum";
    case Op::simd_shuffle:
      return "simd shuffle";
    case Op::simd_vote:
      return "simd vote";
    case Op::quad:
      return "quad function";
    case Op::simdgroup_multiply:
      return "simdgroup_multiply";
    case Op::tensor_operation:
      return "tensor operation";
    case Op::none:
      break;
  }
  return "nothing";
}

uint64_t& counter(Costs& costs, Op op) {
  switch (op) {
    case Op::simdgroup_barrier:
      return costs.simdgroup_barriers;
    case Op::threadgroup_barrier:
      return costs.threadgroup_barriers;
    case Op::simdgroup_multiply:
      return costs.matrix_multiplications;
    default:
      return costs.simd_functions;
  }
}

void count(Op op) {
  if (s.costs && op != Op::tensor_operation) ++counter(*s.costs, op);
}

SimdgroupRecord& simdgroup_of(ThreadRecord& t) { return static_cast<SimdgroupRecord&>(*t.simdgroup); }

std::string whereabouts(const ThreadRecord& t) {
  std::string line = " (line " + std::to_string(line_of(t.site)) + ")";
  switch (t.status) {
    case Status::done:
      return "has returned";
    case Status::at_barrier:
      return std::string("waits at ") + op_name(t.op) + line;
    case Status::in_simdgroup:
      return "is at a " + std::string(op_name(t.op)) + line;
    case Status::ready:
      break;
  }
  return "is elsewhere";
}

// --- choosing the next thread

uint32_t pick(uint32_t mask) {
  if (s.order == Order::Kind::random) {
    uint32_t turn = uint32_t((*s.random)() & 31);
    return (uint32_t(std::countr_zero(std::rotr(mask, int(turn)))) + turn) & 31;
  }
  return uint32_t(std::countr_zero(mask));
}

void set_ready(SimdgroupRecord& g, uint32_t ready) {
  g.ready = ready;
  uint32_t bit = 1u << (&g - s.simdgroups);
  s.ready_simdgroups = ready ? s.ready_simdgroups | bit : s.ready_simdgroups & ~bit;
}

void leave(ThreadRecord& t) {
  SimdgroupRecord& g = simdgroup_of(t);
  set_ready(g, g.ready & ~(1u << g.rank[t.lane]));
}

uint32_t all_lanes(const SimdgroupRecord& g) { return g.width == 32 ? ~0u : (1u << g.width) - 1; }

extern "C" void metal_sim_fiber_main();

void prepare(Fiber& fiber) {
  auto** words = reinterpret_cast<void**>(fiber.top) - frame_words;
  std::memset(words, 0, frame_words * sizeof(void*));
  words[return_word] = reinterpret_cast<void*>(&metal_sim_fiber_main);
  fiber.stack_pointer = words;
}

// Makes t the running thread and returns the stack to switch to.
void* enter(ThreadRecord& t) {
  if (!t.fiber) {
    t.fiber = s.free_fibers[--s.free_count];
    prepare(*t.fiber);
  }
  s.current = &t;
  s.state->thread = &t;
  return t.fiber->stack_pointer;
}

ThreadRecord& next_in(SimdgroupRecord& g) { return g.threads[g.order[pick(g.ready)]]; }

// Suspends the running thread; returns when it is scheduled again.
void yield_from(ThreadRecord& self) {
  SimdgroupRecord& g = simdgroup_of(self);
  bool elsewhere = s.order == Order::Kind::random && ((*s.random)() & 3) == 0;
  if (!g.ready || elsewhere) {
    metal_sim_switch(&self.fiber->stack_pointer, s.host);
    return;
  }
  ThreadRecord& next = next_in(g);
  if (&next != &self) metal_sim_switch(&self.fiber->stack_pointer, enter(next));
}

void check_convergence(SimdgroupRecord& g) {
  for (uint32_t lane = 1; lane < g.width; ++lane)
    if (g.threads[lane].convergence != g.threads[0].convergence)
      fail({"simdgroup",
            "simdgroup_load or simdgroup_store is not called by all lanes with equal arguments (lanes 0 and " +
                std::to_string(lane) + ")"});
  if (g.threads[0].convergence && g.width < 32)
    fail({"simdgroup", "simdgroup_load or simdgroup_store in a simdgroup of " + std::to_string(g.width) + " threads"});
}

void finish_thread() {
  ThreadRecord& self = *s.current;
  SimdgroupRecord& g = simdgroup_of(self);
  self.status = Status::done;
  --s.remaining;
  leave(self);
  bool last = true;
  for (uint32_t lane = 0; lane < g.width && last; ++lane) last = g.threads[lane].status == Status::done;
  if (last) check_convergence(g);
  Fiber* fiber = self.fiber;
  if (!g.ready) {
    s.free_fibers[s.free_count++] = fiber;
    metal_sim_switch(&fiber->stack_pointer, s.host);
    std::abort();
  }
  ThreadRecord& next = next_in(g);
  if (!next.fiber) {
    next.fiber = fiber;
    enter(next);
    return;
  }
  s.free_fibers[s.free_count++] = fiber;
  metal_sim_switch(&fiber->stack_pointer, enter(next));
  std::abort();
}

extern "C" void metal_sim_fiber_main() {
  for (;;) {
    s.entry();
    finish_thread();
  }
}

// --- called by kernels

void meet_in_simdgroup(Op op, uint64_t site, Combine combine, uint32_t flags) {
  ThreadRecord& self = *s.current;
  SimdgroupRecord& g = simdgroup_of(self);
  self.op = op;
  self.site = site;
  if (g.width < 32 && op != Op::simdgroup_barrier)
    fail({"simdgroup", std::string(op_name(op)) + " in a simdgroup of only " + std::to_string(g.width) + " threads",
          nullptr, line_of(site)});
  for (uint32_t lane = 0; g.arrived && lane < g.width; ++lane) {
    const ThreadRecord& other = g.threads[lane];
    if (&other == &self || other.status != Status::in_simdgroup) continue;
    if (other.op != op || other.site != site)
      fail({"simdgroup",
            std::string(op_name(op)) + ": lane " + std::to_string(self.lane) + " is here, but lane " +
                std::to_string(lane) + " " + whereabouts(other),
            nullptr, line_of(site)});
    break;
  }
  self.status = Status::in_simdgroup;
  if (++g.arrived < g.width) {
    leave(self);
  } else {
    check_convergence(g);
    count(op);
    if (combine) combine(g.in, g.out);
    if (op == Op::simdgroup_barrier && flags) ++g.epoch;
    for (uint32_t lane = 0; lane < g.width; ++lane) g.threads[lane].status = Status::ready;
    g.arrived = 0;
    set_ready(g, all_lanes(g));
  }
  yield_from(self);
}

Op op_of_barrier(uint32_t flags) {
  return flags == tensor_operation_flag ? Op::tensor_operation : Op::threadgroup_barrier;
}

void open_barrier() {
  count(op_of_barrier(s.barrier_flags));
  s.at_barrier = 0;
  if (s.barrier_flags & 1) ++s.state->device_epoch;
  if (s.barrier_flags & 2) ++s.state->threadgroup_epoch;
  for (uint32_t i = 0; i < s.simdgroup_count; ++i) {
    SimdgroupRecord& g = s.simdgroups[i];
    for (uint32_t lane = 0; lane < g.width; ++lane) g.threads[lane].status = Status::ready;
    set_ready(g, all_lanes(g));
  }
}

void meet_at_barrier(uint32_t flags, uint64_t site) {
  ThreadRecord& self = *s.current;
  self.status = Status::at_barrier;
  self.op = op_of_barrier(flags);
  self.site = site;
  const char* name = op_name(self.op);
  if (s.at_barrier++ == 0) {
    s.barrier_site = site;
    s.barrier_flags = flags;
  } else if (s.barrier_site != site) {
    fail({"barrier",
          std::string(name) + ": thread " + std::to_string(self.index) +
              " is at this barrier, others are at the one in line " + std::to_string(line_of(s.barrier_site)),
          nullptr, line_of(site)});
  } else if (s.barrier_flags != flags) {
    fail({"barrier", std::string(name) + " with different flags in different threads", nullptr, line_of(site)});
  }
  if (s.at_barrier < s.state->thread_count) {
    leave(self);
    yield_from(self);
    return;
  }
  open_barrier();
  metal_sim_switch(&self.fiber->stack_pointer, s.host);  // so that the first simdgroup of the order goes first
}

// No thread can continue, but some have not returned: describes which threads wait for which.
Failure deadlock() {
  for (uint32_t i = 0; i < s.simdgroup_count; ++i) {
    SimdgroupRecord& g = s.simdgroups[i];
    if (!g.arrived) continue;
    const ThreadRecord* waiting = nullptr;
    const ThreadRecord* missing = nullptr;
    for (uint32_t lane = 0; lane < g.width; ++lane)
      (g.threads[lane].status == Status::in_simdgroup ? waiting : missing) = &g.threads[lane];
    return {"simdgroup",
            std::string(op_name(waiting->op)) + " needs all lanes: lane " + std::to_string(waiting->lane) +
                " of simdgroup " + std::to_string(i) + " waits, lane " + std::to_string(missing->lane) + " " +
                whereabouts(*missing),
            nullptr, line_of(waiting->site)};
  }
  for (uint32_t i = 0; i < s.state->thread_count; ++i)
    if (s.threads[i].status == Status::done)
      return {"barrier",
              std::string(op_name(op_of_barrier(s.barrier_flags))) + " needs all threads: " +
                  std::to_string(s.at_barrier) + " wait, thread " + std::to_string(i) + " has returned",
              nullptr, line_of(s.barrier_site)};
  return {"barrier", "the threadgroup cannot go on", nullptr, 0};
}

// --- setting up

void make_stacks() {
  size_t each = stack_bytes + guard_bytes;
  void* memory =
      mmap(nullptr, thread_memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  s.stacks = static_cast<std::byte*>(memory);
  for (size_t i = 0; i < max_threads_per_threadgroup; ++i) {
    mprotect(s.stacks + i * each, guard_bytes, PROT_NONE);
    // Stacks start at different cache sets, so that switching between them does not evict them.
    s.fibers[i].top = s.stacks + (i + 1) * each - (i % 32) * 192;
  }
}

void make_threads(State& state) {
  const uint32_t* size = state.threads_per_threadgroup;
  uint32_t count = state.thread_count, index = 0;
  for (uint32_t z = 0; z < size[2]; ++z)
    for (uint32_t y = 0; y < size[1]; ++y)
      for (uint32_t x = 0; x < size[0]; ++x, ++index) {
        ThreadRecord& t = s.threads[index];
        static_cast<Thread&>(t) = {{x, y, z}, index, index % 32, index / 32, 0, &s.simdgroups[index / 32]};
        t.fiber = nullptr;
        t.status = Status::ready;
        t.op = Op::none;
        t.site = 0;
      }
  s.simdgroup_count = (count + 31) / 32;
  for (uint32_t i = 0; i < s.simdgroup_count; ++i) {
    SimdgroupRecord& g = s.simdgroups[i];
    g.threads = &s.threads[32 * i];
    g.width = std::min(32u, count - 32 * i);
    g.epoch = 0;
    g.arrived = 0;
    for (uint32_t lane = 0; lane < g.width; ++lane)
      g.order[lane] = uint8_t(s.order == Order::Kind::backward ? g.width - 1 - lane : lane);
    if (s.order == Order::Kind::random)
      for (uint32_t lane = g.width; lane > 1; --lane) std::swap(g.order[lane - 1], g.order[(*s.random)() % lane]);
    for (uint32_t rank = 0; rank < g.width; ++rank) g.rank[g.order[rank]] = uint8_t(rank);
    set_ready(g, all_lanes(g));
  }
}

SimdgroupRecord& next_simdgroup() {
  uint32_t mask = s.ready_simdgroups;
  uint32_t i = s.order == Order::Kind::backward ? 31 - uint32_t(std::countl_zero(mask)) : pick(mask);
  return s.simdgroups[i];
}

// --- time and faults

Failure out_of_time() { return {"time", "the threadgroup does not end (settings().seconds)"}; }

bool on_fiber(uint64_t address) {
  uint64_t begin = reinterpret_cast<uint64_t>(s.stacks);
  return s.in_kernel && address - begin < thread_memory_bytes;
}

uint64_t stack_pointer(void* context) {
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return uint64_t(machine->gregs[REG_RSP]);
#else
  return machine->sp;
#endif
}

void on_signal(int number, siginfo_t* info, void* context) {
  bool is_fault = number == SIGSEGV || number == SIGBUS;
  if (!on_fiber(stack_pointer(context))) {
    if (is_fault) signal(number, SIG_DFL);
    s.out_of_time = !is_fault;
    return;
  }
  if (is_fault)
    fail({"stack", on_fiber(reinterpret_cast<uint64_t>(info->si_addr))
                       ? "the thread's stack overflows (endless recursion?)"
                       : "access to memory outside every array"});
  if (number == SIGILL || number == SIGFPE)
    fail({"arithmetic", "the processor refuses an instruction (division by zero?)"});
  fail(out_of_time());
}

int timer_signal() { return SIGRTMIN + 3; }

struct Clock {
  timer_t timer{};
  pid_t owner = 0;
  long thread = 0;
};
thread_local Clock timer;
struct sigaction old_actions[5];
stack_t old_stack;
int signals(size_t i) { return std::array{SIGSEGV, SIGBUS, SIGILL, SIGFPE, timer_signal()}[i]; }

void set_timer(double seconds) {
  if (timer.owner != getpid()) {
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = timer_signal();
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
    timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer.timer);
    timer.owner = getpid();
  }
  itimerspec when{};
  when.it_value.tv_sec = time_t(seconds);
  when.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9);
  timer_settime(timer.timer, 0, &when, nullptr);
}

}  // namespace

Guard::Guard() {
  static std::byte* alternate = new std::byte[64 << 10];
  stack_t stack{};
  stack.ss_sp = alternate;
  stack.ss_size = 64 << 10;
  sigaltstack(&stack, &old_stack);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  for (size_t i = 0; i < 5; ++i) sigaction(signals(i), &action, &old_actions[i]);
}

void Guard::allow(double seconds) {
  s.out_of_time = 0;
  set_timer(seconds);
}

Guard::~Guard() {
  set_timer(0);
  for (size_t i = 0; i < 5; ++i) sigaction(signals(i), &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
}

void fail(Failure failure) {
  s.in_kernel = 0;
  s.failed = true;
  s.failure = std::move(failure);
  void* abandoned;
  metal_sim_switch(&abandoned, s.host);
  std::abort();
}

std::byte* thread_memory() {
  if (!s.stacks) make_stacks();
  return s.stacks;
}

std::byte* threadgroup_memory() {
  alignas(128) static std::byte memory[max_threadgroup_bytes];
  return memory;
}

abi::Cell* threadgroup_cells() {
  static std::vector<Cell> cells(max_threadgroup_bytes);
  return cells.data();
}

const Failure* run_threadgroup(State& state, void (*entry)(), Order::Kind order, Random& random, Costs* costs) {
  thread_memory();
  s.state = &state;
  s.entry = entry;
  s.order = order;
  s.random = &random;
  s.costs = costs;
  s.at_barrier = 0;
  s.ready_simdgroups = 0;
  s.remaining = state.thread_count;
  s.failed = false;
  s.free_count = 0;
  for (Fiber& fiber : s.fibers) s.free_fibers[max_threads_per_threadgroup - ++s.free_count] = &fiber;
  state.barrier = meet_at_barrier;
  state.rendezvous = meet_in_simdgroup;
  make_threads(state);
  while (s.remaining && !s.failed) {
    if (!s.ready_simdgroups || s.out_of_time) {
      s.failure = s.out_of_time ? out_of_time() : deadlock();
      s.failed = true;
      break;
    }
    void* stack = enter(next_in(next_simdgroup()));
    s.in_kernel = 1;
    metal_sim_switch(&s.host, stack);
    s.in_kernel = 0;
  }
  return s.failed ? &s.failure : nullptr;
}

}  // namespace metal_sim
