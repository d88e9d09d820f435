/* The cold tier on real files: what was written is read again or missed, never anything else. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "kvstore/kvs_tier.h"
#include "kvstore/kvs_tier_internal.h"

#define BLOCK_BYTES 20000u /* with the header not a whole number of pages */
#define SLOT_BYTES 20480u
#define SLOTS 8u
#define WAIT_MS 10000

typedef struct world {
    td_metrics_t *metrics;
    kvs_tier_config_t config;
    kvs_tier_t *tier; /* NULL = closed */
    char dir[64];
    bool has_evicted; /* of the last put */
    uint32_t evicted;
} world_t;

static uint64_t bytes_of(uint32_t slots)
{
    return KVS_TIER_PAGE_BYTES + (uint64_t)slots * SLOT_BYTES;
}

static td_block_key_t key_of(uint32_t n)
{
    td_block_key_t key = {{0}};
    memcpy(key.bytes, &n, sizeof(n));
    key.bytes[12] = 7;
    return key;
}

static uint32_t number_of(const td_block_key_t *key)
{
    uint32_t n = 0;
    memcpy(&n, key->bytes, sizeof(n));
    return n;
}

static const uint8_t *block_of(uint32_t n)
{
    static uint8_t bytes[BLOCK_BYTES];
    uint32_t x = n * 2654435761u + 1;
    for (uint32_t i = 0; i < BLOCK_BYTES; i++) {
        x = x * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(x >> 24);
    }
    return bytes;
}

static void open_tier(world_t *w)
{
    assert_int_equal(td_metrics_create(&w->metrics), TD_OK);
    w->config.metrics = w->metrics;
    assert_int_equal(kvs_tier_create(&w->config, &w->tier), TD_OK);
}

static void close_tier(world_t *w)
{
    kvs_tier_destroy(w->tier);
    td_metrics_destroy(w->metrics);
    w->tier = NULL;
    w->metrics = NULL;
}

static void reopen(world_t *w)
{
    close_tier(w);
    open_tier(w);
}

/* After a kill -9 the kernel may hold the file, and its lock, until what was under way is done. */
static void wait_for_life(world_t *w, uint64_t life)
{
    for (uint32_t i = 0; kvs_tier_life(w->tier) < life; i++) {
        assert_true(i < WAIT_MS / 10);
        (void)poll(NULL, 0, 10);
    }
}

static int setup_with(void **state, bool pread_only)
{
    world_t *w = calloc(1, sizeof(*w));
    assert_non_null(w);
    (void)snprintf(w->dir, sizeof(w->dir), "/tmp/tandem-tier-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    w->config = (kvs_tier_config_t){.dir = w->dir,
                                    .bytes = bytes_of(SLOTS),
                                    .block_bytes = BLOCK_BYTES,
                                    .pread_only = pread_only,
                                    .probe = key_of(4711)};
    open_tier(w);
    *state = w;
    return 0;
}

static int setup(void **state)
{
    return setup_with(state, false);
}

static int setup_pread(void **state)
{
    return setup_with(state, true);
}

static void remove_dir(const char *path)
{
    DIR *dir = opendir(path);
    const struct dirent *entry = NULL;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        (void)unlinkat(dirfd(dir), entry->d_name, 0);
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    (void)rmdir(path);
}

static int teardown(void **state)
{
    world_t *w = *state;
    if (w->tier != NULL) {
        close_tier(w);
    }
    (void)umount2(w->dir, MNT_DETACH); /* a test that failed in the middle */
    remove_dir(w->dir);
    free(w);
    return 0;
}

/* --- jobs ------------------------------------------------------------------------------------- */

static const kvs_tier_done_t *wait_done(world_t *w)
{
    uint64_t until = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    struct pollfd fd = {.fd = kvs_tier_fd(w->tier), .events = POLLIN};
    const kvs_tier_done_t *done = NULL;
    while ((done = kvs_tier_next(w->tier)) == NULL) {
        assert_true(td_now_ns() < until);
        (void)poll(&fd, 1, 100);
    }
    return done;
}

static td_status_t put_status(world_t *w, uint32_t n)
{
    td_block_key_t key = key_of(n);
    const uint8_t *block = block_of(n);
    td_status_t status =
        kvs_tier_put(w->tier, &key, td_block_content_hash(block, BLOCK_BYTES), block);
    if (status == TD_OK) {
        const kvs_tier_done_t *done = wait_done(w);
        assert_int_equal(done->kind, KVS_TIER_PUT);
        assert_int_equal(number_of(&done->key), n);
        status = done->status;
        w->has_evicted = done->has_evicted;
        w->evicted = number_of(&done->evicted);
        kvs_tier_release(w->tier, done);
    }
    return status;
}

static void put(world_t *w, uint32_t n)
{
    assert_int_equal(put_status(w, n), TD_OK);
}

static void put_many(world_t *w, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        put(w, first + i);
    }
}

/* What the tier says of a block; found is always the very block. */
static td_status_t get(world_t *w, uint32_t n)
{
    td_block_key_t key = key_of(n);
    const kvs_tier_done_t *done = NULL;
    td_status_t status = TD_OK;

    assert_int_equal(kvs_tier_get(w->tier, &key, n + 1000), TD_OK);
    done = wait_done(w);
    assert_int_equal(done->kind, KVS_TIER_GET);
    assert_int_equal(done->tag, n + 1000);
    status = done->status;
    if (status == TD_OK) {
        assert_memory_equal(done->bytes, block_of(n), BLOCK_BYTES);
        assert_int_equal(done->hash, td_block_content_hash(done->bytes, BLOCK_BYTES));
    }
    kvs_tier_release(w->tier, done);
    return status;
}

static uint32_t count_found(world_t *w, uint32_t first, uint32_t count)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        td_status_t status = get(w, first + i);
        assert_true(status == TD_OK || status == TD_ERR_NOT_FOUND || status == TD_ERR_CORRUPT);
        found += status == TD_OK;
    }
    return found;
}

/* Bit n: block n is listed. */
static uint64_t listed(world_t *w)
{
    uint64_t bits = 0;
    uint32_t from = 0;
    do {
        const kvs_tier_done_t *done = NULL;
        assert_int_equal(kvs_tier_list(w->tier, from), TD_OK);
        done = wait_done(w);
        assert_int_equal(done->kind, KVS_TIER_LIST);
        for (uint32_t i = 0; i < done->count; i++) {
            uint32_t n = number_of(&done->keys[i]);
            assert_true(n < 64);
            assert_int_equal(done->hashes[i], td_block_content_hash(block_of(n), BLOCK_BYTES));
            bits |= 1ull << n;
        }
        from = done->next;
        kvs_tier_release(w->tier, done);
    } while (from != 0);
    return bits;
}

static uint64_t metric(world_t *w, const char *series)
{
    td_str_t text = {0};
    const char *at = NULL;
    char line[128];
    uint64_t value = 0;

    (void)snprintf(line, sizeof(line), "\ntandem_kvstore_tier_%s ", series);
    assert_int_equal(td_metrics_render(w->metrics, &text), TD_OK);
    at = strstr(text.bytes, line);
    assert_non_null(at);
    value = strtoull(at + strlen(line), NULL, 10);
    td_str_fini(&text);
    return value;
}

/* --- files ------------------------------------------------------------------------------------ */

static int open_file(const world_t *w, const char *name, int flags)
{
    char path[128];
    int fd = -1;
    (void)snprintf(path, sizeof(path), "%s/%s", w->dir, name);
    fd = open(path, flags | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    return fd;
}

static void flip_byte(const world_t *w, uint64_t offset)
{
    int fd = open_file(w, "tier.data", O_RDWR);
    uint8_t byte = 0;
    assert_int_equal(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= 0x20;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    assert_int_equal(fsync(fd), 0);
    (void)close(fd);
}

static void truncate_file(const world_t *w, const char *name, uint64_t bytes)
{
    int fd = open_file(w, name, O_RDWR);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    (void)close(fd);
}

static void write_garbage(const world_t *w, const char *name, uint32_t bytes)
{
    int fd = open_file(w, name, O_RDWR | O_TRUNC);
    for (uint32_t i = 0; i < bytes; i++) {
        uint8_t byte = (uint8_t)(i * 37 + 11);
        assert_int_equal(write(fd, &byte, 1), 1);
    }
    (void)close(fd);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void test_tier_reads_what_was_written(void **state)
{
    world_t *w = *state;

    assert_int_equal(get(w, 0), TD_ERR_NOT_FOUND);
    put_many(w, 0, 5);
    put(w, 0); /* again: it is there */
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(get(w, i), TD_OK);
    }
    assert_int_equal(get(w, 5), TD_ERR_NOT_FOUND);
    assert_int_equal(listed(w), 0x1f);
    assert_int_equal(metric(w, "blocks"), 5);
    assert_int_equal(metric(w, "capacity_blocks"), SLOTS);
    assert_int_equal(metric(w, "written_bytes_total"), 5 * SLOT_BYTES);
    assert_int_equal(metric(w, "gets_total{result=\"hit\"}"), 5);
    assert_int_equal(metric(w, "gets_total{result=\"miss\"}"), 2);
    if (w->config.pread_only) {
        assert_int_equal(metric(w, "io_uring"), 0);
    }
}

/* Many jobs at once: they share syncs and commits, and each gets its own answer. */
static void test_tier_takes_many_at_once(void **state)
{
    world_t *w = *state;
    uint32_t stored = 0;
    uint32_t evicted = 0;

    for (uint32_t round = 0; round < 4; round++) {
        uint32_t under_way = 0;
        for (uint32_t i = 0; i < 12; i++) {
            td_block_key_t key = key_of(round * 12 + i);
            const uint8_t *block = block_of(round * 12 + i);
            assert_int_equal(
                kvs_tier_put(w->tier, &key, td_block_content_hash(block, BLOCK_BYTES), block),
                TD_OK);
            under_way++;
        }
        for (; under_way > 0; under_way--) {
            const kvs_tier_done_t *done = wait_done(w);
            stored += done->status == TD_OK;
            evicted += done->has_evicted;
            assert_true(done->status == TD_OK || done->status == TD_ERR_BUSY);
            kvs_tier_release(w->tier, done);
        }
    }
    /* A batch of more than all slots: those past it are dropped, not written over one another. */
    assert_int_equal(stored - evicted, SLOTS);
    assert_int_equal(count_found(w, 0, 48), SLOTS);
}

static void test_tier_evicts_the_least_recently_used(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    assert_int_equal(get(w, 0), TD_OK);
    put(w, SLOTS);
    assert_true(w->has_evicted);
    assert_int_equal(w->evicted, 1);
    assert_int_equal(get(w, 1), TD_ERR_NOT_FOUND);
    assert_int_equal(get(w, 0), TD_OK);
    assert_int_equal(metric(w, "evictions_total"), 1);
    assert_int_equal(metric(w, "blocks"), SLOTS);
}

static void test_tier_survives_a_restart(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    assert_int_equal(get(w, 0), TD_OK);
    put(w, 10); /* evicts 1, and its commit keeps the use of 0 */
    reopen(w);
    assert_int_equal(listed(w), 0x4fd);
    assert_int_equal(metric(w, "stale_blocks_total"), 0); /* 1 has left the index too */
    assert_int_equal(count_found(w, 0, 11), SLOTS);
    reopen(w);
    put(w, 11);
    assert_true(w->has_evicted);
}

static void test_tier_keeps_uses_over_a_restart(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    assert_int_equal(get(w, 0), TD_OK);
    put(w, 10); /* evicts 1 */
    reopen(w);
    put(w, 11);
    assert_int_equal(w->evicted, 2); /* not 0 */
}

/* I3: damaged content and headers are misses, and the slots are used again. */
static void test_i3_tier_damaged_bytes_are_a_miss(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    flip_byte(w, KVS_TIER_PAGE_BYTES + 3 * SLOT_BYTES + KVS_TIER_HEADER_BYTES + 12345);
    flip_byte(w, KVS_TIER_PAGE_BYTES + 5 * SLOT_BYTES + 9); /* the key in the header */
    assert_int_equal(get(w, 3), TD_ERR_CORRUPT);
    assert_int_equal(get(w, 5), TD_ERR_CORRUPT);
    assert_int_equal(get(w, 3), TD_ERR_NOT_FOUND);
    assert_int_equal(get(w, 4), TD_OK);
    assert_int_equal(metric(w, "gets_total{result=\"corrupt\"}"), 2);
    put_many(w, 20, 2);
    assert_false(w->has_evicted);
    assert_int_equal(get(w, 20), TD_OK);
    assert_int_equal(get(w, 21), TD_OK);
}

/* The right bytes in the wrong place: a slot's whole content copied over another's. */
static void test_i3_tier_misplaced_bytes_are_a_miss(void **state)
{
    world_t *w = *state;
    static uint8_t slot[SLOT_BYTES];
    int fd = -1;

    put_many(w, 0, 3);
    fd = open_file(w, "tier.data", O_RDWR);
    assert_int_equal(pread(fd, slot, SLOT_BYTES, KVS_TIER_PAGE_BYTES), SLOT_BYTES);
    assert_int_equal(pwrite(fd, slot, SLOT_BYTES, KVS_TIER_PAGE_BYTES + SLOT_BYTES), SLOT_BYTES);
    assert_int_equal(fsync(fd), 0);
    (void)close(fd);
    assert_int_equal(get(w, 1), TD_ERR_CORRUPT);
    assert_int_equal(get(w, 0), TD_OK);
}

static void test_tier_finds_stale_headers_at_a_start(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    close_tier(w);
    flip_byte(w, KVS_TIER_PAGE_BYTES + 2 * SLOT_BYTES + 30);
    open_tier(w);
    assert_int_equal(listed(w), 0xfb);
}

static void test_tier_truncated_file(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    close_tier(w);
    truncate_file(w, "tier.data", bytes_of(3) + 100);
    open_tier(w);
    assert_int_equal(listed(w), 0x0f); /* of the fourth the header is there */
    assert_int_equal(count_found(w, 0, SLOTS), 3);
    put_many(w, 0, SLOTS);
    assert_int_equal(count_found(w, 0, SLOTS), SLOTS);
}

static void test_tier_truncated_superblock_is_a_new_tier(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    close_tier(w);
    truncate_file(w, "tier.data", 20);
    open_tier(w);
    assert_int_equal(listed(w), 0);
    put_many(w, 0, SLOTS);
    assert_int_equal(count_found(w, 0, SLOTS), SLOTS);
}

/* The slots themselves say what they hold. */
static void test_tier_lost_or_garbage_index_is_made_anew(void **state)
{
    world_t *w = *state;
    static const uint32_t lengths[] = {0, 3, 5000, 40000};

    put_many(w, 0, SLOTS + 2);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(lengths); i++) {
        close_tier(w);
        write_garbage(w, "tier.index", lengths[i]);
        open_tier(w);
        assert_int_equal(listed(w), 0x3fc);
        assert_int_equal(count_found(w, 0, SLOTS + 2), SLOTS);
    }
    for (uint32_t cut = 4096; cut <= 3 * 4096; cut += 2048) {
        close_tier(w);
        truncate_file(w, "tier.index", cut);
        open_tier(w);
        assert_int_equal(listed(w), 0x3fc);
    }
}

static size_t read_file(const world_t *w, const char *name, uint8_t *bytes, size_t cap)
{
    int fd = open_file(w, name, O_RDONLY);
    ssize_t len = read(fd, bytes, cap);
    assert_true(len > 0);
    (void)close(fd);
    return (size_t)len;
}

static void write_file(const world_t *w, const char *name, const uint8_t *bytes, size_t len)
{
    int fd = open_file(w, name, O_RDWR | O_TRUNC);
    assert_int_equal(write(fd, bytes, len), len);
    (void)close(fd);
}

/* An index that ended the last process that read it is not read again: this one reads well, but
 * knows of half of the slots. */
static void test_tier_index_marked_as_being_read_is_made_anew(void **state)
{
    world_t *w = *state;
    static uint8_t bytes[1 << 20];
    size_t len = 0;

    put_many(w, 0, SLOTS / 2);
    close_tier(w);
    len = read_file(w, "tier.index", bytes, sizeof(bytes));
    open_tier(w);
    put_many(w, SLOTS / 2, SLOTS / 2);
    close_tier(w);
    (void)close(open_file(w, "tier.reading", O_RDWR | O_CREAT));
    write_file(w, "tier.index", bytes, len);
    open_tier(w);
    assert_int_equal(listed(w), 0xff);
    reopen(w);
    assert_int_equal(listed(w), 0xff);
}

/* A tier whose index belongs to another data file of the same form. */
static void test_tier_foreign_index_is_made_anew(void **state)
{
    world_t *w = *state;
    static uint8_t bytes[1 << 20];
    size_t len = 0;

    put_many(w, 0, 4);
    close_tier(w);
    len = read_file(w, "tier.index", bytes, sizeof(bytes));
    truncate_file(w, "tier.data", 0);
    open_tier(w);
    put_many(w, 30, 2);
    close_tier(w);
    write_file(w, "tier.index", bytes, len);
    open_tier(w);
    assert_int_equal(listed(w), 3ull << 30);
}

static void test_tier_of_other_blocks_or_cluster_is_wiped(void **state)
{
    world_t *w = *state;

    put_many(w, 0, 4);
    close_tier(w);
    w->config.probe = key_of(4712);
    open_tier(w);
    assert_int_equal(listed(w), 0);
    put_many(w, 0, 4);
    close_tier(w);
    w->config.block_bytes = BLOCK_BYTES - 1; /* slots of the same size */
    open_tier(w);
    assert_int_equal(listed(w), 0);
    close_tier(w);
    w->config.block_bytes = BLOCK_BYTES;
    open_tier(w);
    assert_int_equal(listed(w), 0);
    put_many(w, 0, 4);
    close_tier(w);
    flip_byte(w, 20);
    open_tier(w);
    assert_int_equal(listed(w), 0);
}

static void test_tier_may_grow_and_shrink(void **state)
{
    world_t *w = *state;

    put_many(w, 0, SLOTS);
    close_tier(w);
    w->config.bytes = bytes_of(SLOTS + 4);
    open_tier(w);
    put_many(w, SLOTS, 4);
    assert_int_equal(listed(w), 0xfff);
    close_tier(w);
    w->config.bytes = bytes_of(5);
    open_tier(w);
    assert_int_equal(listed(w), 0x1f);
    assert_int_equal(count_found(w, 0, SLOTS + 4), 5);
    {
        struct stat st;
        int fd = open_file(w, "tier.data", O_RDONLY);
        assert_int_equal(fstat(fd, &st), 0);
        assert_int_equal(st.st_size, bytes_of(5));
        (void)close(fd);
    }
    close_tier(w);
    w->config.bytes = 1000;
    assert_int_equal(td_metrics_create(&w->metrics), TD_OK);
    assert_int_equal(kvs_tier_create(&w->config, &w->tier), TD_ERR_INVALID);
    td_metrics_destroy(w->metrics);
}

static void test_tier_dropped_blocks_never_come_back(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(2);
    const kvs_tier_done_t *done = NULL;

    put_many(w, 0, 4);
    assert_int_equal(kvs_tier_drop(w->tier, &key), TD_OK);
    done = wait_done(w);
    assert_int_equal(done->kind, KVS_TIER_DROP);
    assert_int_equal(done->status, TD_OK);
    kvs_tier_release(w->tier, done);
    assert_int_equal(get(w, 2), TD_ERR_NOT_FOUND);
    close_tier(w);
    truncate_file(w, "tier.index", 0); /* made anew from the slots */
    open_tier(w);
    assert_int_equal(listed(w), 0xb);
}

/* A drop that follows a put at once forgets that block too, wherever its writing stands. */
static void test_tier_drop_reaches_a_put_under_way(void **state)
{
    world_t *w = *state;

    for (uint32_t n = 0; n < 30; n++) {
        td_block_key_t key = key_of(n);
        uint64_t hash = td_block_content_hash(block_of(n), BLOCK_BYTES);
        assert_int_equal(kvs_tier_put(w->tier, &key, hash, block_of(n)), TD_OK);
        assert_int_equal(kvs_tier_drop(w->tier, &key), TD_OK);
        kvs_tier_release(w->tier, wait_done(w));
        kvs_tier_release(w->tier, wait_done(w));
        assert_int_equal(get(w, n), TD_ERR_NOT_FOUND);
    }
    assert_int_equal(listed(w), 0);
}

static void test_i3_tier_never_writes_other_bytes_than_the_named(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(0);
    const kvs_tier_done_t *done = NULL;

    assert_int_equal(kvs_tier_put(w->tier, &key, 1, block_of(0)), TD_OK);
    done = wait_done(w);
    assert_int_equal(done->status, TD_ERR_CORRUPT);
    kvs_tier_release(w->tier, done);
    assert_int_equal(get(w, 0), TD_ERR_NOT_FOUND);
}

/* I6: what is not taken back leaves no room for more, and that is an answer at once. */
static void test_i6_tier_full_queues_answer_busy(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(0);
    uint64_t hash = td_block_content_hash(block_of(0), BLOCK_BYTES);

    for (uint32_t i = 0; i < KVS_TIER_PUTS_MAX; i++) {
        assert_int_equal(kvs_tier_put(w->tier, &key, hash, block_of(0)), TD_OK);
        assert_int_equal(kvs_tier_get(w->tier, &key, 0), TD_OK);
    }
    assert_false(kvs_tier_can_put(w->tier));
    assert_int_equal(kvs_tier_put(w->tier, &key, hash, block_of(0)), TD_ERR_BUSY);
    assert_int_equal(kvs_tier_get(w->tier, &key, 0), TD_ERR_BUSY);
    assert_int_equal(kvs_tier_list(w->tier, 0), TD_OK);
    assert_int_equal(kvs_tier_list(w->tier, 0), TD_ERR_BUSY);
    for (uint32_t i = 0; i < 2 * KVS_TIER_PUTS_MAX + 1; i++) {
        kvs_tier_release(w->tier, wait_done(w));
    }
    assert_true(metric(w, "puts_total{result=\"dropped\"}") >= 1);
    put(w, 0);
}

static void test_tier_is_used_by_one_process_only(void **state)
{
    world_t *w = *state;
    world_t other = {.config = w->config};

    put_many(w, 0, 2);
    open_tier(&other);
    assert_int_equal(get(&other, 0), TD_ERR_NOT_FOUND);
    assert_int_equal(kvs_tier_life(other.tier), 0);
    assert_int_equal(put_status(&other, 1), TD_ERR_BUSY);
    assert_int_equal(metric(&other, "degraded"), 1);
    close_tier(w); /* it is tried again */
    wait_for_life(&other, 1);
    assert_int_equal(get(&other, 0), TD_OK);
    assert_int_equal(metric(&other, "degraded"), 0);
    close_tier(&other);
}

static void test_tier_removed_directory_is_begun_anew(void **state)
{
    world_t *w = *state;

    put_many(w, 0, 2);
    assert_int_equal(kvs_tier_life(w->tier), 1);
    remove_dir(w->dir);
    wait_for_life(w, 2);
    assert_int_equal(listed(w), 0);
    put_many(w, 3, 2);
    reopen(w);
    assert_int_equal(listed(w), 0x18);
}

/* A disk that fills up: puts fail and are then dropped at once, reads go on, and it recovers. */
static void test_tier_full_disk(void **state)
{
    world_t *w = *state;
    char file[128];
    int fd = -1;
    uint32_t failed = 0;

    close_tier(w);
    if (geteuid() != 0 || mount("tier", w->dir, "tmpfs", 0, "size=1m") != 0) {
        skip(); /* a file size limit is tried below */
    }
    (void)snprintf(file, sizeof(file), "%s/other", w->dir);
    w->config.bytes = bytes_of(60); /* more than there is */
    open_tier(w);
    put_many(w, 0, 3);
    fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    while (write(fd, block_of(1), BLOCK_BYTES) > 0) {
    }
    for (uint32_t i = 3; i < 40; i++) {
        td_status_t status = put_status(w, i);
        failed += status != TD_OK;
        assert_true(status == TD_OK || status == TD_ERR_IO || status == TD_ERR_BUSY);
    }
    assert_true(failed > 0);
    assert_int_equal(metric(w, "degraded"), 1);
    assert_int_equal(get(w, 1), TD_OK);
    assert_int_equal(ftruncate(fd, 0), 0);
    (void)close(fd);
    for (uint32_t i = 0; put_status(w, 50) != TD_OK; i++) {
        assert_true(i < WAIT_MS / 50);
        (void)poll(NULL, 0, 50);
    }
    assert_int_equal(metric(w, "degraded"), 0);
    assert_int_equal(get(w, 50), TD_OK);
    close_tier(w);
    assert_int_equal(umount(w->dir), 0);
}

/* --- processes that fall ---------------------------------------------------------------------- */

#define FALL_SLOTS 24u
#define FALL_KEYS 60u
#define FALL_UNDER_WAY 4u

/* Puts and gets blocks by chance for ever; writes the number of each acknowledged put. */
static _Noreturn void write_for_ever(world_t *w, int out, uint32_t seed)
{
    uint32_t x = seed;
    uint32_t under_way = 0;

    open_tier(w);
    for (uint32_t i = 0; i < 2000; i++) {
        const kvs_tier_done_t *done = NULL;
        td_block_key_t key;
        x = x * 1664525u + 1013904223u;
        key = key_of((x >> 16) % FALL_KEYS);
        if (x >> 30 == 0) {
            under_way += kvs_tier_get(w->tier, &key, 0) == TD_OK;
        } else {
            const uint8_t *block = block_of(number_of(&key));
            under_way += kvs_tier_put(w->tier, &key, td_block_content_hash(block, BLOCK_BYTES),
                                      block) == TD_OK;
        }
        while (under_way >= FALL_UNDER_WAY) {
            uint8_t n = 0;
            done = wait_done(w);
            n = (uint8_t)number_of(&done->key);
            if (done->kind == KVS_TIER_PUT && done->status == TD_OK && write(out, &n, 1) != 1) {
                _exit(1);
            }
            if (done->kind == KVS_TIER_GET && done->status == TD_OK &&
                memcmp(done->bytes, block_of(n), BLOCK_BYTES) != 0) {
                _exit(2);
            }
            kvs_tier_release(w->tier, done);
            under_way--;
        }
    }
    _exit(0);
}

/* Lets a writer fall, at a fault point or after some time, then looks at what is there: every
 * acknowledged block that cannot have been evicted since, and of every block its own bytes or
 * none. Returns how the writer ended. */
static int fall(world_t *w, const char *fault, uint32_t after_us, uint32_t seed)
{
    uint8_t acked[4096];
    ssize_t acked_count = 0;
    int pipe_fds[2];
    int how = 0;
    uint64_t newest = 0;
    uint64_t here = 0;
    pid_t child = 0;

    assert_int_equal(pipe(pipe_fds), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (fault != NULL && td_fault_init(fault) != TD_OK) {
            _exit(3);
        }
        write_for_ever(w, pipe_fds[1], seed);
    }
    (void)close(pipe_fds[1]);
    if (after_us > 0) {
        (void)usleep(after_us);
        (void)kill(child, SIGKILL);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    while (acked_count < (ssize_t)sizeof(acked)) {
        ssize_t n = read(pipe_fds[0], acked + acked_count, sizeof(acked) - (size_t)acked_count);
        if (n <= 0) {
            break;
        }
        acked_count += n;
    }
    (void)close(pipe_fds[0]);

    open_tier(w);
    wait_for_life(w, 1);
    here = listed(w);
    assert_true(count_found(w, 0, FALL_KEYS) == (uint32_t)__builtin_popcountll(here));
    /* Puts under way may have taken slots of the oldest; uses by gets only move blocks back. */
    for (ssize_t i = acked_count; i > 0; i--) {
        newest |= 1ull << acked[i - 1];
        if ((uint32_t)__builtin_popcountll(newest) > FALL_SLOTS / 3) {
            break;
        }
        assert_true((here & newest) == newest);
    }
    close_tier(w);
    return how;
}

static void test_tier_killed_at_every_step(void **state)
{
    world_t *w = *state;
    static const char *const steps[] = {"tier_open",   "tier_wipe",      "tier_reading",
                                        "tier_io",     "tier_write",     "tier_written",
                                        "tier_synced", "tier_committed", "tier_read"};
    static const uint32_t nths[] = {1, 2, 17};
    uint32_t seed = 1;

    if (td_fault_init("tier_io:kill:1000000") != TD_OK) {
        skip(); /* a release build */
    }
    close_tier(w);
    w->config.bytes = bytes_of(FALL_SLOTS);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(steps); i++) {
        for (uint32_t n = 0; n < TD_ARRAY_LEN(nths); n++) {
            char fault[64];
            int how = 0;
            (void)snprintf(fault, sizeof(fault), "%s:kill:%u", steps[i], nths[n]);
            if (i == 1) { /* a tier is made once */
                remove_dir(w->dir);
            }
            w->config.pread_only = seed % 2 == 0;
            how = fall(w, fault, 0, seed++);
            if (n == 0 || i >= 3) {
                assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
            }
            if (i < 3) {
                break; /* steps of a start are passed once */
            }
        }
    }
}

static void test_tier_killed_at_any_time(void **state)
{
    world_t *w = *state;
    uint32_t x = 12345;

    close_tier(w);
    w->config.bytes = bytes_of(FALL_SLOTS);
    for (uint32_t round = 0; round < 40; round++) {
        int how = 0;
        x = x * 1664525u + 1013904223u;
        w->config.pread_only = round % 2 == 1;
        how = fall(w, NULL, 1000 + (x >> 8) % 60000, round + 100);
        assert_true(WIFSIGNALED(how) || WEXITSTATUS(how) == 0);
    }
}

/* Reads what this process logs until that is in it. */
static void await_log(int fd, const char *text)
{
    char log[4096];
    size_t len = 0;

    while (len + 1 < sizeof(log)) {
        const ssize_t got = read(fd, log + len, sizeof(log) - 1 - len);
        if (got <= 0) {
            break;
        }
        len += (size_t)got;
        log[len] = '\0';
        if (strstr(log, text) != NULL) {
            return;
        }
    }
    _exit(4);
}

/* A disk that never answers: everything else goes on, the queue fills, the end comes. */
static void test_i6_tier_stuck_disk_holds_up_nobody(void **state)
{
    world_t *w = *state;
    pid_t child = 0;
    int how = 0;

    close_tier(w);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        td_block_key_t key = key_of(1);
        uint64_t hash = td_block_content_hash(block_of(1), BLOCK_BYTES);
        uint64_t began = 0;
        uint32_t taken = 1;
        int log[2];
        struct pollfd answer = {.events = POLLIN};
        if (td_fault_init("tier_write:hang:2") != TD_OK) {
            _exit(77);
        }
        if (pipe(log) != 0 || dup2(log[1], STDERR_FILENO) < 0) {
            _exit(5);
        }
        td_log_init("test", TD_LOG_LEVEL_WARN);
        open_tier(w);
        put(w, 0);
        began = td_now_ns();
        if (kvs_tier_put(w->tier, &key, hash, block_of(1)) != TD_OK) {
            _exit(1);
        }
        await_log(log[0], "fault injected"); /* else the read below may come before that write */
        while (kvs_tier_put(w->tier, &key, hash, block_of(1)) == TD_OK) {
            taken++;
        }
        if (taken != KVS_TIER_PUTS_MAX || kvs_tier_get(w->tier, &key, 0) != TD_OK) {
            _exit(1);
        }
        answer.fd = kvs_tier_fd(w->tier);
        for (uint32_t i = 0; i < 20; i++) { /* readable does not mean that there is something */
            (void)poll(&answer, 1, 50);
            if (kvs_tier_next(w->tier) != NULL) {
                _exit(3);
            }
        }
        kvs_tier_destroy(w->tier);
        _exit(td_now_ns() - began < (KVS_TIER_STOP_MS + 3000) * TD_NS_PER_MS ? 0 : 2);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    if (WEXITSTATUS(how) == 77) {
        skip();
    }
    assert_int_equal(WEXITSTATUS(how), 0);
}

/* A file that may not grow: an error of ours, not our end by SIGXFSZ. */
static void test_tier_file_size_limit(void **state)
{
    world_t *w = *state;
    pid_t child = 0;
    int how = 0;

    close_tier(w);
    remove_dir(w->dir);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct rlimit limit = {bytes_of(3), bytes_of(3)};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) {
            _exit(77);
        }
        open_tier(w);
        if (get(w, 0) != TD_ERR_NOT_FOUND || metric(w, "degraded") != 1 ||
            put_status(w, 1) != TD_ERR_BUSY) {
            _exit(1);
        }
        close_tier(w);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    if (WEXITSTATUS(how) == 77) {
        skip();
    }
    assert_int_equal(WEXITSTATUS(how), 0);
}

/* As a container's system call filter refuses it, of this process from now on. */
static int refuse_call(uint32_t call, uint32_t error)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = TD_ARRAY_LEN(rules), .filter = rules};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return -1;
    }
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* Blocks are written, found after a restart and read without io_uring: forbidden from the start
 * (EPERM in a container, ENOSYS of an old kernel), or only when it is used. */
static void test_tier_without_io_uring_uses_pread(void **state)
{
    world_t *w = *state;
    static const struct {
        uint32_t call;
        uint32_t error;
    } refusals[] = {
        {SYS_io_uring_setup, EPERM}, {SYS_io_uring_setup, ENOSYS}, {SYS_io_uring_enter, EPERM}};

    close_tier(w);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(refusals); i++) {
        int how = 0;
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) { /* a filter can't be taken back */
            bool ok = true;
            if (refuse_call(refusals[i].call, refusals[i].error) != 0) {
                _exit(77);
            }
            open_tier(w);
            for (uint32_t n = 0; n < SLOTS / 2; n++) {
                ok = ok && put_status(w, i * SLOTS + n) == TD_OK;
            }
            reopen(w);
            for (uint32_t n = 0; n < SLOTS / 2; n++) {
                ok = ok && get(w, i * SLOTS + n) == TD_OK;
            }
            ok = ok && metric(w, "io_uring") == 0 && metric(w, "degraded") == 0;
            close_tier(w);
            _exit(ok ? 0 : 1);
        }
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_true(WIFEXITED(how));
        if (WEXITSTATUS(how) == 77) {
            skip();
        }
        assert_int_equal(WEXITSTATUS(how), 0);
    }
}

static void test_tier_create_without_memory(void **state)
{
    world_t *w = *state;
    td_status_t status = TD_ERR_NO_MEMORY;

    close_tier(w);
    assert_int_equal(td_metrics_create(&w->metrics), TD_OK);
    w->config.metrics = w->metrics;
    for (uint64_t nth = 1; status == TD_ERR_NO_MEMORY; nth++) {
        assert_true(nth < 400);
        td_alloc_fail_at(nth);
        status = kvs_tier_create(&w->config, &w->tier);
        td_alloc_fail_at(0);
    }
    assert_int_equal(status, TD_OK);
    close_tier(w);
}

int main(void)
{
#define TIER_TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
#define TIER_TEST_PREAD(f)                                                                         \
    {                                                                                              \
#f "_pread", f, setup_pread, teardown, NULL                                                \
    }
    const struct CMUnitTest tests[] = {
        TIER_TEST(test_tier_reads_what_was_written),
        TIER_TEST_PREAD(test_tier_reads_what_was_written),
        TIER_TEST(test_tier_takes_many_at_once),
        TIER_TEST_PREAD(test_tier_takes_many_at_once),
        TIER_TEST(test_tier_evicts_the_least_recently_used),
        TIER_TEST(test_tier_survives_a_restart),
        TIER_TEST_PREAD(test_tier_survives_a_restart),
        TIER_TEST(test_tier_keeps_uses_over_a_restart),
        TIER_TEST(test_i3_tier_damaged_bytes_are_a_miss),
        TIER_TEST_PREAD(test_i3_tier_damaged_bytes_are_a_miss),
        TIER_TEST(test_i3_tier_misplaced_bytes_are_a_miss),
        TIER_TEST(test_tier_finds_stale_headers_at_a_start),
        TIER_TEST(test_tier_truncated_file),
        TIER_TEST_PREAD(test_tier_truncated_file),
        TIER_TEST(test_tier_truncated_superblock_is_a_new_tier),
        TIER_TEST(test_tier_lost_or_garbage_index_is_made_anew),
        TIER_TEST(test_tier_index_marked_as_being_read_is_made_anew),
        TIER_TEST(test_tier_foreign_index_is_made_anew),
        TIER_TEST(test_tier_of_other_blocks_or_cluster_is_wiped),
        TIER_TEST(test_tier_may_grow_and_shrink),
        TIER_TEST(test_tier_dropped_blocks_never_come_back),
        TIER_TEST(test_tier_drop_reaches_a_put_under_way),
        TIER_TEST(test_i3_tier_never_writes_other_bytes_than_the_named),
        TIER_TEST(test_i6_tier_full_queues_answer_busy),
        TIER_TEST(test_tier_is_used_by_one_process_only),
        TIER_TEST(test_tier_removed_directory_is_begun_anew),
        TIER_TEST(test_tier_full_disk),
        TIER_TEST_PREAD(test_tier_full_disk),
        TIER_TEST(test_tier_file_size_limit),
        TIER_TEST(test_tier_killed_at_every_step),
        TIER_TEST(test_tier_killed_at_any_time),
        TIER_TEST(test_i6_tier_stuck_disk_holds_up_nobody),
        TIER_TEST(test_tier_without_io_uring_uses_pread),
        TIER_TEST(test_tier_create_without_memory),
    };
    td_log_init("test", getenv("TD_TEST_LOG") == NULL ? TD_LOG_LEVEL_ERROR : TD_LOG_LEVEL_INFO);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
