/* Whole models on the device: the CPU's logits and KV, bit for bit, whatever the chunks, batches,
 * trees, masks and codecs; and what happens when memory runs out. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/cuda/test_cuda_model_rig.h"

uint64_t emu_graphs(void) __attribute__((weak));

static td_model_options_t device_options(void)
{
    td_model_options_t options = cuda_options(64, 8u << 20);

    rig_on_devices(&options, rig_devices);
    return options;
}

/* The same prompt on both, in chunks, then some tokens more: logits and blocks. */
static void check_model(const tiny_spec_t *spec, td_model_options_t options, uint32_t tokens,
                        uint32_t chunk)
{
    static uint32_t turn;
    td_pool_t *pool = NULL; /* every other time kernels write the host's blocks themselves */
    float logits[2][TINY_VOCAB];
    rig_t rigs[2];
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, spec);

    for (int side = 0; side < 2; side++) {
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rigs[side], gguf, &options, 1, tokens);
        if (side == 1 && turn++ % 2 == 0) {
            pool = rig_use_pool(&rigs[1], rigs[1].sequence_blocks);
        }
        prefill(&rigs[side], 0, tokens, chunk, logits[side]);
    }
    cuda_assert_same_bits(logits[0], logits[1], TINY_VOCAB, "logits");
    cuda_assert_same_bits(td_model_hidden(rigs[0].model), td_model_hidden(rigs[1].model), TINY_DIM,
                          "hidden states");
    for (uint32_t t = 0; t < tokens; t++) {
        const td_kv_layout_t *kv = &rigs[0].info->kv;
        const size_t block = t / kv->block_tokens * td_kv_block_bytes(kv);
        for (uint32_t h = 0; h < 2 * kv->layers * kv->kv_heads; h++) {
            const size_t at = td_kv_offset(kv, h / 2 / kv->kv_heads, h % 2 == 1,
                                           h / 2 % kv->kv_heads, t % kv->block_tokens);
            assert_memory_equal(rigs[0].pool + block + at, rigs[1].pool + block + at,
                                td_kv_row_bytes(kv));
        }
    }
    td_model_use_pool(rigs[1].model, NULL);
    td_pool_destroy(pool);
    assert_string_equal(rigs[0].info->numerics_class, rigs[1].info->numerics_class);
    rig_fini(&rigs[0]);
    rig_fini(&rigs[1]);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void test_every_weight_type_and_precision(void **state)
{
    static const td_gguf_type_t types[] = {TD_GGUF_F32,  TD_GGUF_F16,  TD_GGUF_BF16,
                                           TD_GGUF_Q8_0, TD_GGUF_Q4_0, TD_GGUF_Q4_1};

    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(types); i++) {
        for (uint32_t precision = 0; precision <= TD_PRECISION_EXACT; precision++) {
            td_model_options_t options = device_options();
            const tiny_spec_t spec = {.type = types[i], .untied = i % 2 == 1};
            options.precision = (td_precision_t)precision;
            options.kv_codec = (td_kv_codec_t)((i + precision) % TD_KV_CODECS);
            check_model(&spec, options, 20, precision == 0 ? 20 : 7);
        }
    }
}

static void test_chunks_and_long_contexts(void **state)
{
    static const uint32_t chunks[] = {1, 9, 64};

    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(chunks); i++) {
        const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .context = 2048};
        check_model(&spec, device_options(), i == 0 ? 40 : 600, chunks[i]);
    }
}

static void test_masks(void **state)
{
    static const char *const masks[] = {"window:24,3", "strided:20,32,4"};

    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(masks); i++) {
        const tiny_spec_t spec = {.type = TD_GGUF_Q8_0};
        td_model_options_t options = device_options();
        options.attention = masks[i];
        options.context_max = 1024;
        check_model(&spec, options, 150, 40);
    }
}

/* Sequences of different lengths in one pass have the bits that each has alone. */
static void test_a_batch_is_its_sequences(void **state)
{
    enum { SEQUENCES = 5 };
    float alone[SEQUENCES][TINY_VOCAB];
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_0};
    const td_model_options_t options = device_options();
    const float *logits = NULL;
    tiny_t tiny;
    rig_t rig;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    rig_init(&rig, gguf, &options, SEQUENCES, 100);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        prefill(&rig, s, 10 + 17 * s, 64, alone[s]);
    }
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        set_row(&rig, s, s, 9 + 17 * s, true); /* the last tokens again, together */
    }
    assert_int_equal(
        td_model_forward(rig.model, rig.pool, rig.rows, SEQUENCES, 0, NULL, NULL, &logits), TD_OK);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        cuda_assert_same_bits(alone[s], logits + (size_t)s * TINY_VOCAB, TINY_VOCAB, "in a batch");
    }
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* Decoding, whose passes are kept as graphs from the third of a shape on: another context, batch
 * and split in each, and the CPU's logits. */
static void test_decoding_by_graphs_has_the_bits_of_the_cpu(void **state)
{
    enum { SEQUENCES = 3, STEPS = 8, SHORT = 5, LONG = 508 }; /* which crosses a span */
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .context = 1024};
    const uint64_t before = emu_graphs == NULL ? 0 : emu_graphs();
    float *want = calloc(STEPS * SEQUENCES, sizeof(float) * TINY_VOCAB);
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    for (int side = 0; side < 2; side++) {
        td_model_options_t options = device_options();
        const float *logits = NULL;
        float ignored[TINY_VOCAB];
        td_pool_t *pool = NULL;
        rig_t rig;
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rig, gguf, &options, SEQUENCES, LONG + STEPS);
        pool = rig_use_pool(&rig, SEQUENCES * rig.sequence_blocks);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            prefill(&rig, s, s == 0 ? LONG : SHORT * s, 64, ignored);
        }
        for (uint32_t step = 0; step < STEPS; step++) {
            for (uint32_t s = 0; s < SEQUENCES; s++) {
                set_row(&rig, s, s, (s == 0 ? LONG : SHORT * s) + step, true);
            }
            assert_int_equal(
                td_model_forward(rig.model, rig.pool, rig.rows, SEQUENCES, 0, NULL, NULL, &logits),
                TD_OK);
            float *at = want + (size_t)step * SEQUENCES * TINY_VOCAB;
            if (side == 0) {
                memcpy(at, logits, sizeof(float) * SEQUENCES * TINY_VOCAB);
            } else {
                cuda_assert_same_bits(at, logits, (size_t)SEQUENCES * TINY_VOCAB, "by a graph");
            }
        }
        td_model_use_pool(rig.model, NULL);
        td_pool_destroy(pool);
        rig_fini(&rig);
    }
    assert_true(emu_graphs == NULL || emu_graphs() - before >= STEPS - 4);
    free(want);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

typedef struct layers_seen {
    const rig_t *rig;
    const uint8_t *want; /* the blocks as the CPU leaves them */
    uint32_t next;
    uint32_t calls;
} layers_seen_t;

enum { ANNOUNCED_ROWS = 5 };

/* The layers that are announced are in the host's blocks. */
static void on_layers(void *ctx, uint32_t begin, uint32_t end)
{
    layers_seen_t *seen = ctx;
    const td_kv_layout_t *kv = &seen->rig->info->kv;

    assert_int_equal(begin, seen->next);
    for (uint32_t h = begin * 2 * kv->kv_heads; h < end * 2 * kv->kv_heads; h++) {
        const size_t at =
            td_kv_offset(kv, h / 2 / kv->kv_heads, h % 2 == 1, h / 2 % kv->kv_heads, 0);
        assert_memory_equal(seen->rig->pool + at, seen->want + at,
                            ANNOUNCED_ROWS * td_kv_row_bytes(kv));
    }
    seen->next = end;
    seen->calls++;
}

/* With the host's pool mapped and without, a layer at a time and all at once. */
static void test_layers_are_announced_when_they_are_with_the_host(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    uint8_t *want = NULL;
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    for (uint32_t turn = 0; turn <= 2 * (TINY_LAYERS + 1); turn++) {
        td_model_options_t options = device_options();
        const uint32_t step = turn == 0 ? 0 : (turn - 1) / 2;
        const float *logits = NULL;
        td_pool_t *pool = NULL;
        rig_t rig;
        layers_seen_t seen = {.rig = &rig, .want = want};
        options.backend = turn == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rig, gguf, &options, 1, 32);
        if (turn % 2 == 1) {
            pool = rig_use_pool(&rig, rig.sequence_blocks);
        }
        for (uint32_t i = 0; i < ANNOUNCED_ROWS; i++) {
            set_row(&rig, i, 0, i, i + 1 == ANNOUNCED_ROWS);
        }
        assert_int_equal(td_model_forward(rig.model, rig.pool, rig.rows, ANNOUNCED_ROWS, step,
                                          turn == 0 ? NULL : on_layers, &seen, &logits),
                         TD_OK);
        if (turn == 0) {
            want = malloc(rig.pool_bytes);
            memcpy(want, rig.pool, rig.pool_bytes);
        } else {
            assert_int_equal(seen.next, TINY_LAYERS);
            assert_int_equal(seen.calls, step == 1 ? TINY_LAYERS : 1);
            /* What no row has written is as it was: zeros travel with a block, and no other's KV.
             */
            assert_memory_equal(rig.pool, want, rig.pool_bytes);
        }
        td_model_use_pool(rig.model, NULL);
        td_pool_destroy(pool);
        rig_fini(&rig);
    }
    free(want);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* A device that holds few blocks gives up the least recently used, and has them again from the
 * host; one that a pass does not fit into says so, and goes on with the next. */
static void test_blocks_come_and_go(void **state)
{
    enum { SEQUENCES = 6, TOKENS = 60 };
    float want[SEQUENCES][TINY_VOCAB];
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    td_model_options_t options = device_options();
    const float *logits = NULL;
    tiny_t tiny;
    rig_t rig;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    rig_init(&rig, gguf, &options, SEQUENCES, TOKENS);
    options.device_kv_bytes = 9 * td_kv_block_bytes(&rig.info->kv); /* two sequences and a bit */
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        prefill(&rig, s, TOKENS, 64, want[s]);
    }
    rig_fini(&rig);
    rig_init(&rig, gguf, &options, SEQUENCES, TOKENS);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        float got[TINY_VOCAB];
        prefill(&rig, s, TOKENS - 1, 64, got);
    }
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        set_row(&rig, s, s, TOKENS - 1, true);
    }
    assert_int_equal(
        td_model_forward(rig.model, rig.pool, rig.rows, SEQUENCES, 0, NULL, NULL, &logits),
        TD_ERR_NO_MEMORY);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        set_row(&rig, 0, s, TOKENS - 1, true);
        assert_int_equal(td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits),
                         TD_OK);
        cuda_assert_same_bits(want[s], logits, TINY_VOCAB, "blocks that came back");
    }
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* Blocks that the host fills (a fetch) are read as they are, once it has said so. */
static void test_blocks_that_the_host_changed(void **state)
{
    enum { TOKENS = 48 };
    float want[2][TINY_VOCAB];
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    const td_model_options_t options = device_options();
    const float *logits = NULL;
    tiny_t tiny;
    rig_t rig;
    size_t sequence = 0;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    rig_init(&rig, gguf, &options, 2, TOKENS);
    sequence = rig.sequence_blocks * td_kv_block_bytes(&rig.info->kv);
    prefill(&rig, 0, TOKENS, 64, want[0]);
    prefill(&rig, 1, TOKENS, 64, want[1]);
    memcpy(rig.pool + sequence, rig.pool, sequence); /* the first one's KV for the second */
    for (uint32_t b = 0; b < rig.sequence_blocks; b++) {
        td_model_kv_changed(rig.model, rig.sequence_blocks + b);
    }
    set_row(&rig, 0, 1, TOKENS - 1, true);
    rig.rows[0].token = token_at(&rig, 0, TOKENS - 1);
    assert_int_equal(td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits),
                     TD_OK);
    cuda_assert_same_bits(want[0], logits, TINY_VOCAB, "another's KV");
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* A device's part in transfers, and memory that its copies come to and its host's blocks from. */
typedef struct sender {
    td_kv_device_t *device;
    const td_pool_t *pool;
    size_t block_bytes;
    uint8_t *stand_in; /* what is sent where the device has no copy */
    uint8_t *got;
    uint32_t block;
    uint32_t layers; /* that were announced, and are what is asked for */
} sender_t;

static void wait_slot(const sender_t *s)
{
    td_status_t status = TD_INPROGRESS;

    while (status == TD_INPROGRESS) {
        status = s->device->ops->poll(s->device, 0);
    }
    assert_int_equal(status, TD_OK);
}

/* The first bytes of a block as they would be sent: the device's, or the stand-in's. */
static bool sends_its_own(const sender_t *s, uint32_t block, size_t bytes)
{
    td_kv_part_t part = {.epoch = td_pool_epoch(s->pool, block),
                         .host = s->stand_in,
                         .block = block,
                         .bytes = (uint32_t)bytes};

    memset(s->stand_in, 0x77, s->block_bytes);
    assert_int_equal(s->device->ops->gather(s->device, 0, &part, 1), TD_OK);
    wait_slot(s);
    part.host = s->got;
    part.block = TD_POOL_NONE;
    assert_int_equal(s->device->ops->scatter(s->device, 0, &part, 1), TD_OK);
    wait_slot(s);
    if (memcmp(s->got, s->stand_in, bytes) == 0) {
        return false;
    }
    assert_memory_equal(s->got, td_pool_bytes(s->pool, block), bytes);
    return true;
}

static void on_layers_sent(void *ctx, uint32_t begin, uint32_t end)
{
    sender_t *s = ctx;

    (void)begin;
    s->layers = end;
    assert_true(sends_its_own(s, s->block, s->block_bytes / TINY_LAYERS * end));
}

/* What is sent from the device has the bytes of the host's block, all of them: also of a block that
 * is still computed, as far as it was announced; and a block with tokens missing comes from the
 * host, whose zeros stand there. */
static void test_copies_that_are_sent_are_the_hosts_blocks(void **state)
{
    enum { TOKENS = 40, BLOCK_TOKENS = 16 };
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    const td_model_options_t options = device_options();
    const float *logits = NULL;
    sender_t s = {0};
    tiny_t tiny;
    rig_t rig;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);
    td_pool_t *pool = NULL;
    td_status_t status = TD_OK;

    (void)state;
    rig_init(&rig, gguf, &options, 1, 64);
    pool = rig_use_pool(&rig, rig.sequence_blocks);
    assert_int_equal(rig.info->kv.block_tokens, BLOCK_TOKENS);
    s.device = td_model_kv_device(rig.model);
    s.pool = pool;
    s.block_bytes = td_kv_block_bytes(&rig.info->kv);
    s.stand_in = malloc(s.block_bytes);
    s.got = malloc(s.block_bytes);
    status =
        s.device == NULL ? TD_ERR_UNSUPPORTED : s.device->ops->start(s.device, 1, s.block_bytes, 1);
    if (status == TD_OK) {
        for (uint32_t i = 0; i < TOKENS; i++) {
            set_row(&rig, i, 0, i, i + 1 == TOKENS);
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, TOKENS, 1, on_layers_sent, &s, &logits),
            TD_OK);
        assert_int_equal(s.layers, TINY_LAYERS);
        assert_true(sends_its_own(&s, 0, s.block_bytes));
        assert_true(sends_its_own(&s, 1, s.block_bytes));
        assert_false(sends_its_own(&s, 2, s.block_bytes)); /* half of it is nobody's */
        for (uint32_t i = TOKENS; i < 3 * BLOCK_TOKENS; i++) {
            assert_false(sends_its_own(&s, 2, s.block_bytes));
            set_row(&rig, 0, 0, i, true);
            assert_int_equal(
                td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits), TD_OK);
        }
        assert_true(sends_its_own(&s, 2, s.block_bytes));
        td_model_kv_changed(rig.model, 1);
        assert_false(sends_its_own(&s, 1, s.block_bytes));
        s.device->ops->stop(s.device);
    }
    free(s.stand_in);
    free(s.got);
    td_model_use_pool(rig.model, NULL);
    td_pool_destroy(pool);
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
    if (status == TD_ERR_UNSUPPORTED) {
        skip(); /* no NCCL, so nothing is sent */
    }
    assert_int_equal(status, TD_OK);
}

/* Two paths from one trunk, as verification has them: each row as its path alone. */
static void test_trees_have_the_bits_of_their_paths(void **state)
{
    enum { TRUNK = 20, DEPTH = 4 };
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    td_model_options_t options = device_options();
    float *all[2] = {NULL, NULL};
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    for (int side = 0; side < 2; side++) {
        const float *logits = NULL;
        float ignored[TINY_VOCAB];
        rig_t rig;
        uint32_t count = 0;
        uint32_t paths[2][4] = {{0, 1, 2, 3}, {0, 9, 10, 11}}; /* part inside the second block */
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rig, gguf, &options, 3, 64);
        prefill(&rig, 0, TRUNK, 64, ignored);
        td_kv_copy_tokens(&rig.info->kv, rig.pool + 9 * td_kv_block_bytes(&rig.info->kv),
                          rig.pool + td_kv_block_bytes(&rig.info->kv), 0, TRUNK - 16);
        td_model_kv_changed(rig.model, 9);
        /* The first drafted row is on both paths. */
        rig.rows[count++] = (td_model_row_t){.token = 5,
                                             .position = TRUNK,
                                             .blocks = paths[0],
                                             .copies = &paths[1][1],
                                             .copy_count = 1,
                                             .want_logits = true};
        for (uint32_t p = 0; p < 2; p++) {
            for (uint32_t i = 1; i < DEPTH; i++) {
                rig.rows[count++] = (td_model_row_t){.token = 7 + 11 * p + i,
                                                     .position = TRUNK + i,
                                                     .blocks = paths[p],
                                                     .is_branch = p == 1,
                                                     .want_logits = true};
            }
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, count, 0, NULL, NULL, &logits), TD_OK);
        all[side] = malloc(count * sizeof(float) * TINY_VOCAB);
        memcpy(all[side], logits, count * sizeof(float) * TINY_VOCAB);
        if (side == 1) {
            cuda_assert_same_bits(all[0], all[1], (size_t)count * TINY_VOCAB, "tree");
        }
        rig_fini(&rig);
    }
    free(all[0]);
    free(all[1]);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* Sequences that grow, start anew, and get blocks from elsewhere, in passes of all kinds, over a
 * device that holds a part of them: the CPU's logits throughout. */
enum { RANDOM_SEQUENCES = 4, RANDOM_TOKENS = 64, RANDOM_ROWS = 40 };

typedef struct random_run {
    rig_t rigs[2]; /* CPU, device */
    td_pool_t *pool;
    uint64_t random;
    uint32_t lengths[RANDOM_SEQUENCES];
} random_run_t;

static uint32_t below(random_run_t *run, uint32_t limit)
{
    run->random = run->random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(run->random >> 33) % limit;
}

/* As a fetch does it: blocks given out anew, and their bytes written; or, without a new epoch,
 * said. */
static void take_from(random_run_t *run, uint32_t to, uint32_t from)
{
    rig_t *device = &run->rigs[1];
    const size_t bytes = td_kv_block_bytes(&device->info->kv);

    for (uint32_t b = 0; b < device->sequence_blocks; b++) {
        uint32_t *at = &device->blocks[to * device->sequence_blocks + b];
        const uint32_t source = device->blocks[from * device->sequence_blocks + b];
        if (below(run, 2) == 0) {
            td_pool_unref(run->pool, *at);
            assert_int_equal(td_pool_take(run->pool, at), TD_OK);
        } else {
            td_model_kv_changed(device->model, *at);
        }
        memcpy(device->pool + *at * bytes, device->pool + source * bytes, bytes);
        memcpy(run->rigs[0].pool + (to * device->sequence_blocks + b) * bytes,
               run->rigs[0].pool + (from * device->sequence_blocks + b) * bytes, bytes);
    }
    run->lengths[to] = run->lengths[from];
}

/* Some sequences grow by some rows each. */
static void grow(random_run_t *run)
{
    const float *logits[2] = {NULL, NULL};
    uint32_t rows = 0;

    for (uint32_t s = 0; s < RANDOM_SEQUENCES; s++) {
        uint32_t count = below(run, 3) == 0 ? 0 : 1 + below(run, below(run, 2) == 0 ? 2 : 20);
        if (run->lengths[s] + count > RANDOM_TOKENS) {
            run->lengths[s] = 0; /* another one begins there */
        }
        count = TD_MIN(count, RANDOM_ROWS - rows);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t token = below(run, TINY_VOCAB);
            for (int side = 0; side < 2; side++) {
                set_row(&run->rigs[side], rows, s, run->lengths[s] + i, i + 1 == count);
                run->rigs[side].rows[rows].token = token;
            }
            rows++;
        }
        run->lengths[s] += count;
    }
    for (int side = 0; rows > 0 && side < 2; side++) {
        rig_t *rig = &run->rigs[side];
        assert_int_equal(
            td_model_forward(rig->model, rig->pool, rig->rows, rows, 0, NULL, NULL, &logits[side]),
            TD_OK);
    }
    for (uint32_t i = 0, n = 0; i < rows; i++) {
        if (run->rigs[0].rows[i].want_logits) {
            cuda_assert_same_bits(logits[0] + (size_t)n * TINY_VOCAB,
                                  logits[1] + (size_t)n * TINY_VOCAB, TINY_VOCAB, "random pass");
            n++;
        }
    }
}

static void test_random_passes_have_the_bits_of_the_cpu(void **state)
{
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q4_0});

    (void)state;
    for (uint32_t seed = 1; seed <= 6; seed++) {
        random_run_t run = {.random = seed};
        td_model_options_t options = device_options();
        options.kv_codec = (td_kv_codec_t)(seed % TD_KV_CODECS);
        options.attention = seed % 3 == 0 ? "window:21,2" : NULL;
        for (int side = 0; side < 2; side++) {
            options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
            if (side == 1) { /* all sequences and no more; or all the memory that is asked for */
                options.device_kv_bytes = 16 * td_kv_block_bytes(&run.rigs[0].info->kv);
            }
            rig_init(&run.rigs[side], gguf, &options, RANDOM_SEQUENCES, RANDOM_TOKENS);
        }
        /* A few blocks more than the sequences have, so that a new one is another one. */
        const size_t bytes = td_kv_block_bytes(&run.rigs[1].info->kv);
        const uint32_t blocks = RANDOM_SEQUENCES * run.rigs[1].sequence_blocks;
        td_free(run.rigs[1].pool);
        run.rigs[1].pool = td_calloc(blocks + 5, bytes);
        assert_int_equal(td_pool_create(run.rigs[1].pool, blocks + 5, bytes, &run.pool), TD_OK);
        td_model_use_pool(run.rigs[1].model, run.pool);
        for (uint32_t b = 0; b < blocks; b++) {
            assert_int_equal(td_pool_take(run.pool, &run.rigs[1].blocks[b]), TD_OK);
        }
        for (uint32_t pass = 0; pass < 30; pass++) {
            grow(&run);
            if (below(&run, 4) == 0) {
                const uint32_t to = below(&run, RANDOM_SEQUENCES);
                take_from(&run, to,
                          (to + 1 + below(&run, RANDOM_SEQUENCES - 1)) % RANDOM_SEQUENCES);
            }
        }
        td_model_use_pool(run.rigs[1].model, NULL);
        td_pool_destroy(run.pool);
        rig_fini(&run.rigs[0]);
        rig_fini(&run.rigs[1]);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void test_first_layers_only(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    float want[TINY_VOCAB];
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    for (int side = 0; side < 2; side++) {
        td_model_options_t options = device_options();
        const float *logits = NULL;
        rig_t rig;
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rig, gguf, &options, 1, 32);
        for (uint32_t i = 0; i < 9; i++) {
            set_row(&rig, i, 0, i, i == 8);
        }
        assert_int_equal(td_model_forward_first(rig.model, 1, rig.pool, rig.rows, 9, &logits),
                         TD_OK);
        if (side == 0) {
            memcpy(want, logits, sizeof(want));
        } else {
            cuda_assert_same_bits(want, logits, TINY_VOCAB, "first layers");
        }
        rig_fini(&rig);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* With every size of memory loading works or says that there is too little, and leaves nothing. */
static void test_loading_with_too_little_memory(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    const td_model_options_t options = device_options();
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    if (emu_set_memory == NULL) {
        td_gguf_close(gguf);
        tiny_fini(&tiny);
        skip(); /* a device's memory is what it is */
    }
    (void)rig_load_with_growing_memory(gguf, &options, -1);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static const struct CMUnitTest tests[] = {
    RIG_ON_DEVICES(test_every_weight_type_and_precision),
    RIG_ON_DEVICES(test_chunks_and_long_contexts),
    RIG_ON_DEVICES(test_masks),
    RIG_ON_DEVICES(test_a_batch_is_its_sequences),
    RIG_ON_DEVICES(test_layers_are_announced_when_they_are_with_the_host),
    RIG_ON_DEVICES(test_blocks_come_and_go),
    RIG_ON_DEVICES(test_blocks_that_the_host_changed),
    RIG_ON_ONE_DEVICE(test_copies_that_are_sent_are_the_hosts_blocks),
    RIG_ON_DEVICES(test_trees_have_the_bits_of_their_paths),
    RIG_ON_DEVICES(test_decoding_by_graphs_has_the_bits_of_the_cpu),
    RIG_ON_DEVICES(test_random_passes_have_the_bits_of_the_cpu),
    RIG_ON_TWO_APART(test_random_passes_have_the_bits_of_the_cpu),
    RIG_ON_TWO_APART(test_decoding_by_graphs_has_the_bits_of_the_cpu),
    RIG_ON_DEVICES(test_first_layers_only),
    RIG_ON_DEVICES(test_loading_with_too_little_memory),
};
CUDA_TEST_MAIN(tests)
