/* tandem-bench transfer - fetching blocks out of another process, beside memcpy of as many bytes.
 *
 * For each carrier two processes are forked before UCX is touched: an owner, which fills its pool
 * and answers, and a reader, which measures and sends its figures home. They know each other by
 * what they exchange over a socket pair, as nodes do through the router. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/transfer/td_transfer.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_fork.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_samples.h"

#define TRANSFER_OWNER 1u /* incarnations */
#define TRANSFER_READER 2u
#define TRANSFER_ADDRESS_BYTES_MAX 65536u
#define TRANSFER_POOL_BYTES_MAX ((size_t)1 << 34)
#define TRANSFER_DEADLINE_NS (60 * TD_NS_PER_S)
#define TRANSFER_CARRIERS_MAX 8u

typedef struct transfer_options {
    const char *carriers[TRANSFER_CARRIERS_MAX];
    uint32_t carrier_count;
    uint32_t block_bytes;
    uint32_t blocks;
    uint32_t repeat;
    bool json;
} transfer_options_t;

typedef struct transfer_figures {
    double fetch_gb_s;
    double fetch_lat_us;
    double copy_gb_s;
} transfer_figures_t;

/* What one end tells the other before its address, its key and the epochs of its blocks. */
typedef struct hello {
    uint64_t base;
    uint32_t address_bytes;
    uint32_t rkey_bytes;
} hello_t;

typedef struct end {
    const transfer_options_t *options;
    const char *carrier;
    int socket; /* to the other end */
    td_transfer_t *transfer;
    uint64_t *epochs; /* owned; of the owner's blocks */
} end_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench transfer [options]\n"
        "\n"
        "Fetches distinct blocks out of another process's pool, all at once and one by one,\n"
        "and copies as many bytes with memcpy in the same run. Speeds are the best of the\n"
        "repeats; the latency of one block is the best of their medians. With several\n"
        "carriers each one's keys begin with its name.\n"
        "\n"
        "Options:\n"
        "  --carrier LIST  auto, tcp, shm, with commas between; default shm,tcp\n"
        "  --size B        bytes of a block, default 368640\n"
        "  --blocks N      default 256\n"
        "  --repeat N      default 5\n"
        "  --json          one JSON object instead of a table\n"
        "  --help          this text");
}

/* --- the two ends meet ------------------------------------------------------------------------ */

static bool tell_address(const end_t *end)
{
    const void *address = NULL;
    const void *rkey = NULL;
    size_t address_len = 0;
    size_t rkey_len = 0;
    hello_t hello = {0};

    td_transfer_address(end->transfer, &address, &address_len, &rkey, &rkey_len, &hello.base);
    if (address_len > TRANSFER_ADDRESS_BYTES_MAX || rkey_len > TRANSFER_ADDRESS_BYTES_MAX) {
        return false;
    }
    hello.address_bytes = (uint32_t)address_len;
    hello.rkey_bytes = (uint32_t)rkey_len;
    return bench_send_all(end->socket, &hello, sizeof(hello)) &&
           bench_send_all(end->socket, address, address_len) &&
           bench_send_all(end->socket, rkey, rkey_len);
}

static bool hear_address(const end_t *end, uint64_t incarnation)
{
    static uint8_t address[TRANSFER_ADDRESS_BYTES_MAX];
    static uint8_t rkey[TRANSFER_ADDRESS_BYTES_MAX];
    hello_t hello = {0};

    if (!bench_receive_all(end->socket, &hello, sizeof(hello)) ||
        hello.address_bytes > sizeof(address) || hello.rkey_bytes > sizeof(rkey) ||
        !bench_receive_all(end->socket, address, hello.address_bytes) ||
        !bench_receive_all(end->socket, rkey, hello.rkey_bytes)) {
        return false;
    }
    td_transfer_peer_t peer = {.incarnation = incarnation,
                               .address = address,
                               .address_len = hello.address_bytes,
                               .rkey = rkey,
                               .rkey_len = hello.rkey_bytes,
                               .base = hello.base,
                               .block_count = end->options->blocks,
                               .block_bytes = end->options->block_bytes};
    return td_transfer_peer_add(end->transfer, &peer) == TD_OK;
}

static bool create(end_t *end, uint64_t incarnation)
{
    td_transfer_config_t config = {.block_count = end->options->blocks,
                                   .block_bytes = end->options->block_bytes,
                                   .incarnation = incarnation};

    if (strcmp(end->carrier, "tcp") == 0) {
        (void)setenv("UCX_TLS", "tcp", 1);
    } else if (strcmp(end->carrier, "shm") == 0) {
        (void)setenv("UCX_TLS", "tcp,posix,sysv", 1);
    } /* auto: what a node would choose */
    end->epochs = td_calloc(end->options->blocks, sizeof(*end->epochs));
    return end->epochs != NULL && td_transfer_create(&config, &end->transfer) == TD_OK;
}

/* --- the owner -------------------------------------------------------------------------------- */

static uint8_t pattern(uint32_t block)
{
    return (uint8_t)(block * 37 + 11);
}

/* Answers until the reader has gone. */
static bool own(end_t *end)
{
    const transfer_options_t *o = end->options;
    td_pool_t *pool = NULL;
    char byte = 0;
    bool ok = create(end, TRANSFER_OWNER) &&
              td_pool_create(td_transfer_memory(end->transfer), o->blocks, o->block_bytes, &pool) ==
                  TD_OK;

    if (ok) {
        td_transfer_set_pool(end->transfer, pool);
        for (uint32_t i = 0; i < o->blocks; i++) {
            memset(td_pool_bytes(pool, i), pattern(i), o->block_bytes);
            end->epochs[i] = td_pool_epoch(pool, i);
        }
        ok = tell_address(end) && hear_address(end, TRANSFER_READER) &&
             bench_send_all(end->socket, end->epochs, o->blocks * sizeof(*end->epochs));
    }
    while (ok && recv(end->socket, &byte, 1, 0) > 0) {
    }
    if (end->transfer != NULL) {
        td_transfer_destroy(end->transfer);
    }
    td_pool_destroy(pool);
    td_free(end->epochs);
    return ok;
}

/* --- the reader ------------------------------------------------------------------------------- */

typedef struct reader {
    end_t end;
    td_fetch_piece_t *pieces; /* owned; [blocks] */
    uint8_t *copy;            /* owned; [blocks][block_bytes]: what memcpy reads */
    pthread_mutex_t mutex;
    pthread_cond_t done;
    bool is_done; /* under mutex */
    bench_samples_t latency;
} reader_t;

static void on_complete(td_fetch_t *fetch)
{
    reader_t *r = fetch->ctx;
    pthread_mutex_lock(&r->mutex);
    r->is_done = true;
    pthread_cond_signal(&r->done);
    pthread_mutex_unlock(&r->mutex);
}

/* Fetches blocks [begin, end) as one; 0 on failure. Units: ns. */
static uint64_t fetch(reader_t *r, uint32_t begin, uint32_t end)
{
    uint64_t begin_ns = td_now_ns();
    td_fetch_t fetch = {.peer = TRANSFER_OWNER,
                        .deadline_ns = begin_ns + TRANSFER_DEADLINE_NS,
                        .complete = on_complete,
                        .ctx = r,
                        .pieces = r->pieces + begin,
                        .piece_count = end - begin};
    const char *wanted = r->end.carrier;

    r->is_done = false;
    if (td_transfer_fetch(r->end.transfer, &fetch) != TD_OK) {
        return 0;
    }
    pthread_mutex_lock(&r->mutex);
    while (!r->is_done) {
        pthread_cond_wait(&r->done, &r->mutex);
    }
    pthread_mutex_unlock(&r->mutex);
    if (fetch.status != TD_OK) {
        (void)bench_usage_error("a fetch failed: %s", td_status_name(fetch.status));
        return 0;
    }
    if (strcmp(wanted, "auto") != 0 && strcmp(wanted, td_carrier_name(fetch.carrier)) != 0) {
        (void)bench_usage_error("blocks came by %s, not by %s", td_carrier_name(fetch.carrier),
                                wanted);
        return 0;
    }
    return TD_MAX(td_now_ns() - begin_ns, 1);
}

static bool blocks_are_right(const reader_t *r)
{
    const transfer_options_t *o = r->end.options;

    for (uint32_t i = 0; i < o->blocks; i++) {
        for (uint32_t k = 0; k < o->block_bytes; k++) {
            if (r->pieces[i].dest[k] != pattern(i)) {
                (void)bench_usage_error("block %u holds wrong bytes", i);
                return false;
            }
        }
    }
    return true;
}

static uint64_t copy_all(const reader_t *r)
{
    const transfer_options_t *o = r->end.options;
    uint64_t begin_ns = td_now_ns();

    for (uint32_t i = 0; i < o->blocks; i++) {
        memcpy(r->pieces[i].dest, r->copy + (size_t)i * o->block_bytes, o->block_bytes);
    }
    return TD_MAX(td_now_ns() - begin_ns, 1);
}

static bool measure(reader_t *r, transfer_figures_t *out)
{
    const transfer_options_t *o = r->end.options;
    const double bytes = (double)o->blocks * o->block_bytes;
    uint64_t fetch_ns = UINT64_MAX;
    uint64_t copy_ns = UINT64_MAX;

    if (fetch(r, 0, 1) == 0) { /* the first one also connects */
        return false;
    }
    out->fetch_lat_us = 1e18;
    for (uint32_t k = 0; k < o->repeat; k++) {
        uint64_t ns = fetch(r, 0, o->blocks);
        if (ns == 0 || (k == 0 && !blocks_are_right(r))) {
            return false;
        }
        fetch_ns = TD_MIN(fetch_ns, ns);
        copy_ns = TD_MIN(copy_ns, copy_all(r));
        bench_samples_fini(&r->latency);
        for (uint32_t i = 0; i < o->blocks; i++) {
            ns = fetch(r, i, i + 1);
            if (ns == 0) {
                return false;
            }
            bench_samples_add_ns(&r->latency, ns);
        }
        out->fetch_lat_us =
            TD_MIN(out->fetch_lat_us, bench_samples_percentile(&r->latency, 50) * 1e3);
        out->fetch_gb_s = bytes / (double)fetch_ns;
        out->copy_gb_s = bytes / (double)copy_ns;
        (void)fprintf(stderr, "tandem-bench: %s %u/%u: fetch %.2f GB/s, copy %.2f GB/s, %.1f us\n",
                      r->end.carrier, k + 1, o->repeat, out->fetch_gb_s, out->copy_gb_s,
                      out->fetch_lat_us);
    }
    return true;
}

static bool prepare(reader_t *r)
{
    const transfer_options_t *o = r->end.options;
    uint8_t *memory = NULL;

    r->pieces = td_calloc(o->blocks, sizeof(*r->pieces));
    r->copy = td_alloc_aligned(64, (size_t)o->blocks * o->block_bytes);
    if (r->pieces == NULL || r->copy == NULL || !create(&r->end, TRANSFER_READER) ||
        !hear_address(&r->end, TRANSFER_OWNER) || !tell_address(&r->end) ||
        !bench_receive_all(r->end.socket, r->end.epochs, o->blocks * sizeof(*r->end.epochs))) {
        return false;
    }
    memory = td_transfer_memory(r->end.transfer);
    memset(r->copy, 1,
           (size_t)o->blocks * o->block_bytes); /* pages are there before memcpy is timed */
    for (uint32_t i = 0; i < o->blocks; i++) {
        r->pieces[i] = (td_fetch_piece_t){.epoch = r->end.epochs[i],
                                          .block = i,
                                          .bytes = o->block_bytes,
                                          .dest = memory + (size_t)i * o->block_bytes};
    }
    return true;
}

static bool read_figures(const end_t *end, transfer_figures_t *out)
{
    reader_t r = {.end = *end};
    bool ok = false;

    (void)pthread_mutex_init(&r.mutex, NULL);
    (void)pthread_cond_init(&r.done, NULL);
    ok = prepare(&r) && measure(&r, out);
    if (r.end.transfer != NULL) {
        td_transfer_destroy(r.end.transfer);
    }
    bench_samples_fini(&r.latency);
    td_free(r.end.epochs);
    td_free(r.pieces);
    td_free(r.copy);
    (void)pthread_cond_destroy(&r.done);
    (void)pthread_mutex_destroy(&r.mutex);
    return ok;
}

/* --- processes -------------------------------------------------------------------------------- */

_Noreturn static void reader_main(const end_t *end, int home)
{
    transfer_figures_t figures = {0};
    bool ok = read_figures(end, &figures) && bench_send_all(home, &figures, sizeof(figures));
    exit(ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED);
}

/* Ends are sockets: pair[0] owner, pair[1] reader; home[0] here, home[1] reader. */
static bool run_carrier(const transfer_options_t *o, const char *carrier, transfer_figures_t *out)
{
    end_t end = {.options = o, .carrier = carrier};
    int pair[2] = {-1, -1};
    int home[2] = {-1, -1};
    pid_t owner = -1;
    pid_t reader = -1;
    bool ok = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0 &&
              socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, home) == 0;

    if (ok && (owner = bench_fork()) == 0) {
        (void)close(pair[1]);
        (void)close(home[0]);
        (void)close(home[1]);
        end.socket = pair[0];
        exit(own(&end) ? BENCH_EXIT_OK : BENCH_EXIT_FAILED);
    }
    if (ok && owner > 0 && (reader = bench_fork()) == 0) {
        (void)close(pair[0]);
        (void)close(home[0]);
        end.socket = pair[1];
        reader_main(&end, home[1]);
    }
    (void)close(pair[0]);
    (void)close(pair[1]);
    (void)close(home[1]);
    ok = ok && reader > 0 && bench_receive_all(home[0], out, sizeof(*out));
    (void)close(home[0]);
    ok = bench_ended_well(reader) && ok;
    return bench_ended_well(owner) && ok;
}

/* --- options ---------------------------------------------------------------------------------- */

/* Cuts the list in place. */
static bool parse_carriers(char *list, void *out)
{
    transfer_options_t *o = out;
    static const char *const known[] = {"auto", "tcp", "shm"};
    char *rest = NULL;

    o->carrier_count = 0;
    for (char *word = strtok_r(list, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
        const char *found = NULL;
        for (size_t i = 0; i < TD_ARRAY_LEN(known); i++) {
            found = strcmp(word, known[i]) == 0 ? known[i] : found;
        }
        if (found == NULL || o->carrier_count == TRANSFER_CARRIERS_MAX) {
            (void)bench_usage_error(
                "--carrier wants auto, tcp, shm, with commas between, not \"%s\"", word);
            return false;
        }
        o->carriers[o->carrier_count++] = found;
    }
    if (o->carrier_count == 0) {
        (void)bench_usage_error("--carrier wants auto, tcp, shm, with commas between");
    }
    return o->carrier_count > 0;
}

static int parse_options(int argc, char **argv, transfer_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "carrier", .kind = BENCH_OWN, .out = o, .parse = parse_carriers},
        {.name = "size", .kind = BENCH_NUMBER, .out = &o->block_bytes, .min = 1, .max = 1u << 30},
        {.name = "blocks",
         .kind = BENCH_NUMBER,
         .out = &o->blocks,
         .min = 1,
         .max = TD_TRANSFER_PIECES_MAX},
        BENCH_REPEAT_OPTION(&o->repeat),
        BENCH_JSON_OPTION(&o->json),
    };
    size_t bytes = 0;
    int rc =
        bench_parse_options(argc, argv, "transfer", print_help, options, TD_ARRAY_LEN(options));

    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    if (!td_size_mul(o->blocks, o->block_bytes, &bytes) || bytes > TRANSFER_POOL_BYTES_MAX) {
        return bench_usage_error("--size times --blocks is more than %zu bytes",
                                 TRANSFER_POOL_BYTES_MAX);
    }
    return BENCH_EXIT_OK;
}

static void add_figure(json_t *figures, const char *prefix, const char *key, double value)
{
    char name[64];
    (void)snprintf(name, sizeof(name), "%s%s%s", prefix, *prefix == '\0' ? "" : "_", key);
    (void)json_object_set_new(figures, name, json_real(value));
}

/* After the last fork: what is allocated here would be a leak in a child. */
static void print_all(const transfer_options_t *o, const transfer_figures_t *all)
{
    json_t *figures = json_object();

    for (uint32_t i = 0; i < o->carrier_count; i++) {
        const char *prefix = o->carrier_count > 1 ? o->carriers[i] : "";
        add_figure(figures, prefix, "fetch_gb_s", all[i].fetch_gb_s);
        add_figure(figures, prefix, "fetch_lat_us", all[i].fetch_lat_us);
        add_figure(figures, prefix, "copy_gb_s", all[i].copy_gb_s);
    }
    bench_print_figures(figures, o->json);
    json_decref(figures);
}

int bench_transfer(int argc, char **argv)
{
    transfer_options_t o = {.carriers = {"shm", "tcp"},
                            .carrier_count = 2,
                            .block_bytes = 368640, /* SmolLM2-135M, 16 tokens */
                            .blocks = 256,
                            .repeat = 5};
    transfer_figures_t figures[TRANSFER_CARRIERS_MAX] = {0};
    bool ok = true;
    int rc = parse_options(argc, argv, &o);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    for (uint32_t i = 0; i < o.carrier_count && ok; i++) {
        ok = run_carrier(&o, o.carriers[i], &figures[i]);
    }
    if (ok) {
        print_all(&o, figures);
    } else {
        (void)bench_usage_error("transfer failed (above)");
    }
    return ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}
