/* Fibers, barriers, shared memory and launches of the emulator. Built without instrumentation:
 * under ThreadSanitizer it tells what it does through the fiber interface. */
#include "tests/emu/emu.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/emu/emu_run.h"

#ifdef EMU_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *at);
void __tsan_release(void *at);
void __tsan_write_range(void *at, unsigned long bytes);
void __tsan_read_range(void *at, unsigned long bytes);
}
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

extern "C" unsigned char __start_emu_shared[] __attribute__((weak));
extern "C" unsigned char __stop_emu_shared[] __attribute__((weak));

#define STACK_BYTES (256u * 1024)
#define COPIES_MAX 512
#define KERNELS_MAX 128
#define PAGE 4096u

namespace emu
{
emu_uint3 thread_idx;
emu_uint3 block_idx;
emu_uint3 block_dim;
emu_uint3 grid_dim;
unsigned lane;
unsigned char *dynamic_shared;

struct pending_copy {
    void *to;
    const void *from;
    unsigned group;
};

struct fiber {
    void *stack_pointer;
    emu_uint3 idx;
    unsigned lane;
    unsigned warp;
    bool done;
    unsigned turn; /* which of the two sets of slots its next warp operation uses */
    pending_copy copies[COPIES_MAX];
    unsigned copy_count;
    unsigned copy_group;
    TSAN(void *tsan;)
};

/* Threads that wait for each other: a block, or some lanes of a warp. */
struct gate {
    unsigned arrived;
    unsigned mask; /* of the warp operation that is under way */
    fiber *waiting[EMU_THREADS_MAX];
    char order[2]; /* addresses for the race detector */
    unsigned generation;
};

static fiber fibers[EMU_THREADS_MAX];
static fiber *current;
static fiber *ready[EMU_THREADS_MAX];
static unsigned ready_count;
static unsigned ready_at;
static unsigned thread_count;
static unsigned live;
static unsigned warp_live[EMU_WARPS_MAX]; /* lanes, as bits */
static gate block_gate;
static gate warp_gates[EMU_WARPS_MAX];
static uint64_t slots[2][EMU_WARPS_MAX][32];
static unsigned char collective_in[2][EMU_WARPS_MAX][32][64];
static unsigned char collective_out[2][EMU_WARPS_MAX][32][64];
static unsigned char *stacks;
static unsigned char *shared_area;
static void *host_stack_pointer;
static invoke_fn kernel_invoke;
static const char *kernel_name = "none";
static void **kernel_args;
static emu_order_t order;
static uint32_t random_state = 1;
TSAN(static void *tsan_host; static char tsan_blocks;)

struct kernel {
    const char *name;
    const void *address;
    invoke_fn invoke;
    size_t param_bytes;
};
static kernel kernels[KERNELS_MAX];
static unsigned kernel_count;

registration::registration(const char *name, const void *address, invoke_fn invoke,
                           size_t param_bytes)
{
    if (kernel_count == KERNELS_MAX) {
        fprintf(stderr, "emu: more than %d kernels\n", KERNELS_MAX);
        abort();
    }
    kernels[kernel_count++] = {name, address, invoke, param_bytes};
}

[[noreturn]] static void fail(const char *why)
{
    fprintf(stderr, "emu: %s: kernel %s block %u,%u,%u thread %u,%u,%u\n", why, kernel_name,
            block_idx.x, block_idx.y, block_idx.z, thread_idx.x, thread_idx.y, thread_idx.z);
    _exit(EMU_EXIT_FAULT);
}

/* --- fibers ----------------------------------------------------------------------------------- */

extern "C" void emu_switch(void **save, void *to);
__asm__(".text\n"
        ".globl emu_switch\n"
        "emu_switch:\n"
        "    push %rbp\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    push %r14\n"
        "    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n"
        "    pop %r14\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    pop %rbp\n"
        "    ret\n");

static uint32_t next_random()
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static void push_ready(fiber *f)
{
    ready[(ready_at + ready_count++) % EMU_THREADS_MAX] = f;
}

static fiber *pop_ready()
{
    if (order == EMU_ORDER_RANDOM) {
        const unsigned pick = (ready_at + next_random() % ready_count) % EMU_THREADS_MAX;
        fiber *const f = ready[pick];
        ready[pick] = ready[ready_at];
        ready[ready_at] = f;
    }
    fiber *const f = ready[ready_at];
    ready_at = (ready_at + 1) % EMU_THREADS_MAX;
    ready_count--;
    return f;
}

static void become(fiber *f)
{
    current = f;
    thread_idx = f->idx;
    lane = f->lane;
}

/* Lets another thread run until this one is ready again. */
static void wait_turn()
{
    fiber *const self = current;

    if (ready_count == 0) {
        fail("threads wait for others that will not come (a barrier or warp operation not reached "
             "by all)");
    }
    fiber *const next = pop_ready();
    if (next != self) {
        become(next);
        TSAN(__tsan_switch_to_fiber(next->tsan, 1);)
        emu_switch(&self->stack_pointer, next->stack_pointer);
    }
}

static void open_gate(gate *g, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        push_ready(g->waiting[order == EMU_ORDER_DESCENDING ? count - 1 - i : i]);
    }
    g->arrived = 0;
    g->mask = 0;
    g->generation++;
}

/* Waits until `needed` threads have come; the last one runs `last` before any goes on. */
static void pass_gate(gate *g, unsigned needed, void (*last)(fiber *))
{
    char *const sign = &g->order[g->generation % 2];

    (void)sign;
    TSAN(__tsan_release(sign);)
    if (g->arrived + 1 == needed) {
        if (last != nullptr) {
            TSAN(__tsan_acquire(sign);) /* it reads what all have brought */
            last(current);
            TSAN(__tsan_release(sign);)
        }
        open_gate(g, needed - 1);
    } else {
        g->waiting[g->arrived++] = current;
        wait_turn();
    }
    TSAN(__tsan_acquire(sign);)
}

void sync_block()
{
    pass_gate(&block_gate, live, nullptr);
}

static void pass_warp(unsigned mask, void (*last)(fiber *))
{
    gate *const g = &warp_gates[current->warp];

    if ((mask >> current->lane & 1) == 0) {
        fail("a lane is not in the mask of its own warp operation");
    }
    if (g->arrived > 0 && g->mask != mask) {
        fail("lanes of a warp are in operations with different masks");
    }
    if ((mask & ~warp_live[current->warp]) != 0) {
        fail("a warp operation names lanes that have left");
    }
    g->mask = mask;
    pass_gate(g, (unsigned)__builtin_popcount(mask), last);
}

/* A block smaller than a warp, or lanes that were never there, are not named. */
static unsigned whole_warp(unsigned mask)
{
    const unsigned there = thread_count - current->warp * 32;

    return there >= 32 ? mask : mask & ((1u << there) - 1);
}

void sync_warp(unsigned mask)
{
    pass_warp(whole_warp(mask), nullptr);
}

uint64_t exchange(unsigned mask, uint64_t value, unsigned from)
{
    const unsigned turn = current->turn ^= 1;
    const unsigned warp = current->warp;

    slots[turn][warp][current->lane] = value;
    if (from > 31 || (mask >> from & 1) == 0) {
        fail("a shuffle reads a lane outside its mask");
    }
    pass_warp(whole_warp(mask), nullptr);
    return slots[turn][warp][from];
}

unsigned ballot(unsigned mask, bool value)
{
    const unsigned turn = current->turn ^= 1;
    const unsigned warp = current->warp;
    unsigned bits = 0;

    slots[turn][warp][current->lane] = value ? 1 : 0;
    pass_warp(whole_warp(mask), nullptr);
    for (unsigned l = 0; l < 32; l++) {
        if ((mask >> l & 1) != 0 && slots[turn][warp][l] != 0) {
            bits |= 1u << l;
        }
    }
    return bits;
}

static collective_fn collective_run;

static void run_collective(fiber *f)
{
    collective_run(collective_in[f->turn][f->warp], collective_out[f->turn][f->warp]);
}

void collective(collective_fn run, const void *in, size_t in_bytes, void *out, size_t out_bytes)
{
    const unsigned turn = current->turn ^= 1;
    const unsigned warp = current->warp;
    const unsigned self = current->lane;

    memcpy(collective_in[turn][warp][self], in, in_bytes);
    collective_run = run;
    pass_warp(~0u, run_collective);
    memcpy(out, collective_out[turn][warp][self], out_bytes);
}

void copy_async16(void *shared, const void *global)
{
    if ((((uintptr_t)shared | (uintptr_t)global) & 15) != 0) {
        fail("an asynchronous copy is not aligned to 16 bytes");
    }
    if (current->copy_count == COPIES_MAX) {
        fail("too many asynchronous copies under way for the emulator");
    }
    current->copies[current->copy_count++] = {shared, global, current->copy_group};
}

void copy_commit()
{
    current->copy_group++;
}

void copy_wait(unsigned groups_left)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < current->copy_count; i++) {
        const pending_copy copy = current->copies[i];
        if (copy.group + groups_left < current->copy_group) {
            TSAN(__tsan_read_range((void *)copy.from, 16); __tsan_write_range(copy.to, 16);)
            memcpy(copy.to, copy.from, 16);
        } else {
            current->copies[kept++] = copy;
        }
    }
    current->copy_count = kept;
}

/* --- blocks ----------------------------------------------------------------------------------- */

static void run_thread()
{
    TSAN(__tsan_acquire(&tsan_blocks);)
    kernel_invoke(kernel_args);
    TSAN(__tsan_release(&tsan_blocks);)
    current->done = true;
    live--;
    warp_live[current->warp] &= ~(1u << current->lane);
    if (live > 0 && block_gate.arrived == live) {
        open_gate(&block_gate, live); /* they had waited for this one, which is not coming */
    }
    if (live > 0) {
        wait_turn();
    }
    TSAN(__tsan_switch_to_fiber(tsan_host, 1);)
    void *unused = nullptr;
    emu_switch(&unused, host_stack_pointer);
    fail("a thread that had ended was run again");
}

static void poison(size_t shared_bytes)
{
    if (__start_emu_shared != nullptr) {
        memset(__start_emu_shared, 0xff, (size_t)(__stop_emu_shared - __start_emu_shared));
    }
    /* Its end lies at a page that nobody may touch. */
    dynamic_shared =
        shared_area + EMU_SHARED_BYTES_MAX / PAGE * PAGE + PAGE - (shared_bytes + 15) / 16 * 16;
    memset(dynamic_shared, 0xff, (shared_bytes + 15) / 16 * 16);
}

static void begin_fiber(unsigned i)
{
    fiber *const f = &fibers[i];
    void **top = (void **)(stacks + (size_t)(i + 1) * (STACK_BYTES + PAGE));

    f->done = false;
    f->turn = 0;
    f->copy_count = 0;
    f->copy_group = 0;
    f->idx = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
    f->lane = i % 32;
    f->warp = i / 32;
    warp_live[f->warp] |= 1u << f->lane;
    *--top = nullptr; /* keeps the stack aligned as behind a call */
    *--top = (void *)run_thread;
    for (int r = 0; r < 6; r++) {
        *--top = nullptr;
    }
    f->stack_pointer = top;
    TSAN(f->tsan = __tsan_create_fiber(0);)
}

static void run_block(size_t shared_bytes)
{
    poison(shared_bytes);
    memset(&block_gate, 0, offsetof(gate, waiting));
    live = thread_count;
    ready_count = 0;
    ready_at = 0;
    for (unsigned w = 0; w < EMU_WARPS_MAX; w++) {
        warp_gates[w].arrived = 0;
        warp_live[w] = 0;
    }
    for (unsigned i = 0; i < thread_count; i++) {
        begin_fiber(i);
    }
    for (unsigned i = 0; i < thread_count; i++) {
        push_ready(&fibers[order == EMU_ORDER_DESCENDING ? thread_count - 1 - i : i]);
    }
    fiber *const first = pop_ready();
    become(first);
    TSAN(tsan_host = __tsan_get_current_fiber(); __tsan_release(&tsan_blocks);
         __tsan_switch_to_fiber(first->tsan, 1);)
    emu_switch(&host_stack_pointer, first->stack_pointer);
    TSAN(__tsan_acquire(&tsan_blocks);)
    for (unsigned i = 0; i < thread_count; i++) {
        if (!fibers[i].done) {
            fail("a block ended before all of its threads");
        }
        TSAN(__tsan_destroy_fiber(fibers[i].tsan);)
    }
}

static void on_fault(int signal_number)
{
    (void)signal_number;
    fail("access outside of memory");
}

static void *map(size_t bytes)
{
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        perror("emu: mmap");
        abort();
    }
    return at;
}

/* A fiber's stack may be the one that has no room, so faults have one of their own. It is the
 * thread's that launches, for as long as it does. */
static stack_t fault_stack()
{
    static unsigned char bytes[64 * 1024];
    stack_t stack = {};

    stack.ss_sp = bytes;
    stack.ss_size = sizeof(bytes);
    return stack;
}

static void prepare()
{
    struct sigaction action = {};

    stacks = (unsigned char *)map((size_t)EMU_THREADS_MAX * (STACK_BYTES + PAGE));
    for (size_t i = 0; i < EMU_THREADS_MAX; i++) {
        (void)mprotect(stacks + i * (STACK_BYTES + PAGE), PAGE, PROT_NONE);
    }
    shared_area = (unsigned char *)map(EMU_SHARED_BYTES_MAX + 4 * PAGE);
    (void)mprotect(shared_area + EMU_SHARED_BYTES_MAX / PAGE * PAGE + PAGE, PAGE, PROT_NONE);
    action.sa_handler = on_fault;
    action.sa_flags = SA_ONSTACK;
    (void)sigaction(SIGSEGV, &action, nullptr);
    (void)sigaction(SIGBUS, &action, nullptr);
}

static const kernel *find_kernel(const void *address)
{
    for (unsigned i = 0; i < kernel_count; i++) {
        if (kernels[i].address == address) {
            return &kernels[i];
        }
    }
    return nullptr;
}
} // namespace emu

using namespace emu;

extern "C" void emu_set_order(emu_order_t wanted, uint32_t seed)
{
    order = wanted;
    random_state = seed;
}

extern "C" int emu_check(const void *address, const unsigned grid[3], const unsigned block[3],
                         size_t shared_bytes, size_t *param_bytes_out)
{
    const kernel *const k = find_kernel(address);
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];

    if (k == nullptr) {
        return EMU_ERROR_KERNEL;
    }
    if (threads == 0 || threads > EMU_THREADS_MAX || shared_bytes > EMU_SHARED_BYTES_MAX ||
        grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 || grid[2] > 65535) {
        return EMU_ERROR_SHAPE;
    }
    *param_bytes_out = k->param_bytes;
    return 0;
}

extern "C" void emu_launch(const void *address, const unsigned grid[3], const unsigned block[3],
                           void *params, size_t shared_bytes)
{
    const kernel *const k = find_kernel(address);
    void *args[1] = {params};
    const stack_t on_faults = fault_stack();
    stack_t before = {};

    if (stacks == nullptr) {
        prepare();
    }
    (void)sigaltstack(&on_faults, &before);
    thread_count = block[0] * block[1] * block[2];
    kernel_invoke = k->invoke;
    kernel_name = k->name;
    kernel_args = args;
    block_dim = {block[0], block[1], block[2]};
    grid_dim = {grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                block_idx = {x, y, z};
                run_block(shared_bytes);
            }
        }
    }
    kernel_name = "none";
    (void)sigaltstack(&before, nullptr);
}
