// Runs the threads of a Metal compute kernel on a CPU.
//
// Every thread of a threadgroup is a fiber with its own stack; SIMD-group operations and barriers are rendezvous.
// Threadgroups are spread over OS threads. The order in which fibers run is a parameter (see run_threadgroup), so that
// a missing barrier shows up as a result that depends on it. Threadgroup memory starts as NaN and may not pass 32 KB.
#pragma once
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace msl_rt {
enum { MAX_THREADS = 1024, STACK = 128 << 10, MEMORY_LIMIT = 32768 };

struct Size3 { unsigned x, y, z; };

struct Group {                                // a SIMD-group, or a whole threadgroup for its barriers
  int alive, arrived, tag;
  uint32_t generation, mask[2];
  alignas(16) unsigned char slot[2][32][32];  // what each lane brought; two generations, since readers may lag by one
  float product[2][64];                       // an 8x8 result
};
struct Fiber {
  void* sp;
  char* stack;
  int id, lane, next, prev;
  Group* simdgroup;
  Size3 position;
};
struct Job {
  void (*body)(const Job&, const Fiber&, Size3 threadgroup);
  void** buffers;
  Size3 grid, threads, groups;
  int order;
  uint32_t seed;
};
struct Worker {
  Fiber fiber[MAX_THREADS];
  Group simdgroup[MAX_THREADS / 32], threadgroup;
  int count = 0, current = 0, idle = 0, stuck = 0, simdgroups = 0;
  int sg_current[MAX_THREADS / 32], sg_order[MAX_THREADS / 32], sg_place[MAX_THREADS / 32];
  void* main_sp = nullptr;
  uint64_t progress = 0, seen = 0, collectives = 0;
  const Job* job = nullptr;
  Size3 tg;
  alignas(16) unsigned char memory[MEMORY_LIMIT];
  int used = 0, arrays = 0, array_key[64], array_offset[64], array_size[64];
};
inline thread_local Worker* W = nullptr;
inline std::atomic<int> failed{0};
inline char failure[512];
inline std::atomic<uint64_t> total_collectives{0}, most_memory{0};

// Saves the callee-saved registers on the running stack, stores its pointer and continues on the other stack.
extern "C" void msl_switch(void** save, void* load) asm("msl_switch_local");
#if defined(__x86_64__)
enum { ENTRY = 6, FRAME = 7 };  // words of a frame: six registers, then the entry address
asm(R"(
.text
msl_switch_local:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
enum { ENTRY = 11, FRAME = 20 };  // x19..x28, x29, x30 (the entry address), d8..d15
asm(R"(
.text
msl_switch_local:
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
)");
#else
#error "the emulator's fiber switch knows x86-64 and arm64 only"
#endif

inline void* fresh_stack(char* stack, void (*entry)()) {
  void** top = (void**)(stack + STACK - 64);
#if defined(__x86_64__)
  *--top = nullptr;  // where the entry function's caller would be; keeps the stack 16-byte aligned as after a call
#endif
  top -= FRAME;
  memset(top, 0, FRAME * sizeof(void*));
  top[ENTRY] = (void*)entry;
  return top;
}

[[noreturn]] inline void die(const char* why, int line) {
  snprintf(failure, sizeof failure, "%s (kernel line %d, thread %d)", why, line, W->fiber[W->current].id);
  failed = 1;
  void* dropped;
  msl_switch(&dropped, W->main_sp);  // leaves the whole threadgroup
  __builtin_unreachable();
}

inline int other_simdgroup(Worker& w, int s) {
  for (int i = 1; i <= w.simdgroups; i++) {
    int o = w.sg_order[(w.sg_place[s] + i) % w.simdgroups];
    if (w.simdgroup[o].alive) return o;
  }
  return -1;
}

inline void yield() {
  Worker& w = *W;
  const int c = w.current;
  int n = w.fiber[c].next;
  if (w.progress == w.seen) {
    if (++w.idle > 4 * w.count + 64) die("deadlock: threads wait at different barriers", w.fiber[c].simdgroup->tag >> 8);
    w.stuck++;
  } else {
    w.seen = w.progress;
    w.idle = w.stuck = 0;
  }
  if (w.job->order >= 3 && w.stuck > w.fiber[c].simdgroup->alive) {  // this SIMD-group can go no further
    w.stuck = 0;
    const int s = c >> 5, o = other_simdgroup(w, s);
    w.sg_current[s] = n;
    if (o != s) n = w.sg_current[o];
  }
  if (n == c) return;
  w.current = n;
  msl_switch(&w.fiber[c].sp, w.fiber[n].sp);
}

// Waits until every living thread of the group came to the same operation; the last one runs `last`.
template <class F> inline int rendezvous(Group& g, int lane, int op, int line, F&& last) {
  const uint32_t mine = g.generation;
  const int p = mine & 1, tag = line << 8 | op;
  if (g.arrived == 0) {
    g.tag = tag;
    g.mask[p] = 0;
  } else if (g.tag != tag) {
    die("divergent SIMD-group operation or barrier", line);
  }
  g.mask[p] |= 1u << lane;
  auto finish = [&] {
    last(p);
    g.arrived = 0;
    g.generation++;
    W->progress++;
    W->collectives++;
  };
  if (++g.arrived == g.alive) finish();
  else
    while (g.generation == mine) {
      yield();
      if (g.generation == mine && g.arrived == g.alive) finish();  // the others ended meanwhile
    }
  return p;
}

inline Fiber& me() { return W->fiber[W->current]; }

inline void* threadgroup_array(int key, int size) {
  Worker& w = *W;
  for (int i = 0; i < w.arrays; i++)
    if (w.array_key[i] == key && w.array_size[i] == size) return w.memory + w.array_offset[i];
  const int offset = (w.used + 15) & ~15;
  if (offset + size > MEMORY_LIMIT) die("threadgroup memory over 32 KB", key / 64);
  if (w.arrays == 64) die("more than 64 threadgroup arrays", key / 64);
  memset(w.memory + offset, 0xff, size);  // NaN in every float type
  w.array_key[w.arrays] = key;
  w.array_size[w.arrays] = size;
  w.array_offset[w.arrays++] = offset;
  w.used = offset + size;
  return w.memory + offset;
}

inline void fiber_main() {
  Worker& w = *W;
  w.job->body(*w.job, w.fiber[w.current], w.tg);
  Fiber& f = w.fiber[w.current];
  f.simdgroup->alive--;
  w.threadgroup.alive--;
  w.progress++;
  w.fiber[f.prev].next = f.next;
  w.fiber[f.next].prev = f.prev;
  void* dropped;
  int n = f.next;
  if (n == f.id) {
    const int o = w.job->order >= 3 ? other_simdgroup(w, f.id >> 5) : -1;
    if (o < 0) msl_switch(&dropped, w.main_sp);
    n = w.sg_current[o];
  }
  w.current = n;
  msl_switch(&dropped, w.fiber[n].sp);
  __builtin_unreachable();
}

// Orders 0, 1, 2: one ring of all fibers (ascending, descending, shuffled), so that SIMD-groups advance together.
// Orders 3, 4: one SIMD-group runs until it can go no further, then the next (ascending, descending).
inline void run_threadgroup(const Job& j, Size3 tg, Size3 size) {
  Worker& w = *W;
  w.job = &j;
  w.tg = tg;
  w.count = size.x * size.y * size.z;
  w.simdgroups = (w.count + 31) / 32;
  w.used = w.arrays = w.idle = w.stuck = 0;
  int order[MAX_THREADS];
  for (int i = 0; i < w.count; i++) order[i] = j.order == 1 ? w.count - 1 - i : i;
  if (j.order == 2) {
    uint32_t s = j.seed * 2654435761u + tg.x * 97 + tg.y * 31 + tg.z * 7 + 1;
    for (int i = w.count - 1; i > 0; i--) {
      s = s * 1664525u + 1013904223u;
      std::swap(order[i], order[(s >> 8) % (i + 1)]);
    }
  }
  w.threadgroup.arrived = w.threadgroup.generation = 0;
  w.threadgroup.alive = w.count;
  for (int i = 0; i < w.simdgroups; i++) {
    Group& g = w.simdgroup[i];
    g.arrived = g.generation = 0;
    g.alive = std::min(32, w.count - 32 * i);
    const int o = j.order == 4 ? w.simdgroups - 1 - i : i;
    w.sg_order[i] = o;
    w.sg_place[o] = i;
    w.sg_current[o] = o * 32;
  }
  for (int i = 0; i < w.count; i++) {
    Fiber& f = w.fiber[i];
    f.id = i;
    f.lane = i & 31;
    f.simdgroup = &w.simdgroup[i >> 5];
    f.position = {i % size.x, (i / size.x) % size.y, i / (size.x * size.y)};
    f.sp = fresh_stack(f.stack, fiber_main);
  }
  for (int i = 0; i < w.count; i++) {
    Fiber& f = w.fiber[order[i]];
    f.next = order[(i + 1) % w.count];
    f.prev = order[(i + w.count - 1) % w.count];
  }
  if (j.order >= 3)
    for (int i = 0; i < w.count; i++) {
      const int first = i & ~31, n = w.simdgroup[i >> 5].alive;
      w.fiber[i].next = first + (i - first + 1) % n;
      w.fiber[i].prev = first + (i - first + n - 1) % n;
    }
  w.current = j.order == 4 ? w.sg_order[0] * 32 : order[0];
  msl_switch(&w.main_sp, w.fiber[w.current].sp);
  uint64_t m = most_memory.load();
  while (m < (uint64_t)w.used && !most_memory.compare_exchange_weak(m, w.used)) {}
}

struct AnyPointer { void* p; template <class T> operator T*() const { return (T*)p; } };
struct AnyReference { void* p; template <class T> operator T&() const { return *(T*)p; } };

struct Pool { const Job* job; uint64_t total; std::atomic<uint64_t> next{0}; };
inline void* work(void* argument) {
  Pool& pool = *(Pool*)argument;
  const Job& j = *pool.job;
  W = new Worker;
  const size_t bytes = (size_t)STACK * MAX_THREADS;
  char* stacks = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int i = 0; i < MAX_THREADS; i++) W->fiber[i].stack = stacks + (size_t)i * STACK;
  for (uint64_t t; !failed && (t = pool.next++) < pool.total;) {
    const Size3 tg = {unsigned(t % j.groups.x), unsigned(t / j.groups.x % j.groups.y), unsigned(t / j.groups.x / j.groups.y)};
    const Size3 size = {std::min(j.threads.x, j.grid.x - tg.x * j.threads.x), std::min(j.threads.y, j.grid.y - tg.y * j.threads.y),
                        std::min(j.threads.z, j.grid.z - tg.z * j.threads.z)};
    run_threadgroup(j, tg, size);
  }
  total_collectives += W->collectives;
  munmap(stacks, bytes);
  delete W;
  W = nullptr;
  return nullptr;
}

inline int launch(Job j, int workers) {
  j.groups = {(j.grid.x + j.threads.x - 1) / j.threads.x, (j.grid.y + j.threads.y - 1) / j.threads.y,
              (j.grid.z + j.threads.z - 1) / j.threads.z};
  failed = 0;
  Pool pool{&j, (uint64_t)j.groups.x * j.groups.y * j.groups.z};
  pthread_t threads[64];
  workers = std::min<uint64_t>(std::min(workers, 64), pool.total);
  for (int i = 0; i < workers; i++) pthread_create(&threads[i], nullptr, work, &pool);
  for (int i = 0; i < workers; i++) pthread_join(threads[i], nullptr);
  return failed.load();
}
}  // namespace msl_rt
