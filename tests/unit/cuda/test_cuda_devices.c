/* Models that several devices run together: the CPU's logits and blocks, bit for bit, whatever
 * their number and shares, whether they can read each other's memory, and however far one is ahead
 * of the other. On a machine with fewer devices one stands for several. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/model/cuda/td_cuda_share.h"
#include "tests/unit/cuda/test_cuda_model_rig.h"

size_t emu_memory_used_of(int device) __attribute__((weak));

/* How the devices run: what changes no bit. */
typedef struct way {
    bool peers;       /* they read each other's memory */
    bool mapped;      /* and write the host's blocks */
    uint32_t streams; /* random state of the order of streams; 0: none goes ahead */
} way_t;

static way_t way_of(uint32_t turn)
{
    return (way_t){.peers = turn % 2 == 0, .mapped = turn / 2 % 2 == 0, .streams = turn % 5};
}

static void set_way(const way_t *way)
{
    if (emu_set_devices != NULL) {
        emu_set_devices(EMU_DEVICES, way->peers);
        emu_set_streams(way->streams);
    }
}

static td_model_options_t options_of(uint32_t devices)
{
    td_model_options_t options = cuda_options(64, 8u << 20);

    rig_on_devices(&options, devices);
    return options;
}

/* The same prompt on both, in chunks: logits, hidden states, and all bytes of the blocks. */
static void check_model(const tiny_spec_t *spec, td_model_options_t options, uint32_t tokens,
                        uint32_t chunk, way_t way)
{
    td_pool_t *pool = NULL;
    float logits[2][TINY_VOCAB];
    rig_t rigs[2];
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, spec);

    set_way(&way);
    for (int side = 0; side < 2; side++) {
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rigs[side], gguf, &options, 1, tokens);
        if (side == 1 && way.mapped) {
            pool = rig_use_pool(&rigs[1], rigs[1].sequence_blocks);
        }
        prefill(&rigs[side], 0, tokens, chunk, logits[side]);
    }
    cuda_assert_same_bits(logits[0], logits[1], TINY_VOCAB, "logits");
    cuda_assert_same_bits(td_model_hidden(rigs[0].model), td_model_hidden(rigs[1].model), TINY_DIM,
                          "hidden states");
    assert_memory_equal(rigs[0].pool, rigs[1].pool, rigs[0].pool_bytes);
    td_model_use_pool(rigs[1].model, NULL);
    td_pool_destroy(pool);
    assert_string_equal(rigs[0].info->numerics_class, rigs[1].info->numerics_class);
    rig_fini(&rigs[0]);
    rig_fini(&rigs[1]);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
    if (emu_set_streams != NULL) {
        emu_set_streams(0);
    }
}

static void test_two_devices_have_the_bits_of_the_cpu(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};

    (void)state;
    for (uint32_t turn = 0; turn < 10; turn++) {
        check_model(&spec, options_of(2), 40, 17, way_of(turn));
    }
}

/* Heads of 16: with one of an odd number of KV heads a device's part of the attention ends within a
 * group of 32. */
static void test_every_weight_type_and_precision(void **state)
{
    static const td_gguf_type_t types[] = {TD_GGUF_F32,  TD_GGUF_F16,  TD_GGUF_BF16,
                                           TD_GGUF_Q8_0, TD_GGUF_Q4_0, TD_GGUF_Q4_1};
    uint32_t turn = 0;

    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(types); i++) {
        for (uint32_t precision = 0; precision <= TD_PRECISION_EXACT; precision++, turn++) {
            const tiny_spec_t spec = {.type = types[i],
                                      .untied = i % 2 == 1,
                                      .kv_heads = 4,
                                      .kv_group = 1 + turn / 2 % 2};
            td_model_options_t options = options_of(turn % 2 == 0 ? 4 : 2);
            options.precision = (td_precision_t)precision;
            options.kv_codec = (td_kv_codec_t)((i + precision) % TD_KV_CODECS);
            check_model(&spec, options, 20, precision == 0 ? 20 : 7, way_of(turn));
        }
    }
}

/* KV heads, groups of the feed-forward and the vocabulary that do not come out even; shares of
 * nothing. */
static void test_uneven_shares(void **state)
{
    static const struct {
        td_gguf_type_t type;
        uint32_t kv_heads;
        uint32_t kv_group;
        uint32_t ff;
        uint32_t devices;
    } cases[] = {
        {TD_GGUF_Q4_1, 3, 2, 96, 2},  {TD_GGUF_Q8_0, 3, 4, 96, 3},  {TD_GGUF_F16, 3, 3, 88, 2},
        {TD_GGUF_Q4_0, 5, 2, 32, 4},  {TD_GGUF_Q4_1, 8, 1, 128, 8}, {TD_GGUF_Q4_1, 8, 2, 64, 4},
        {TD_GGUF_BF16, 7, 1, 200, 7},
    };
    uint32_t turn = 0;

    (void)state;
    for (size_t i = 0; i < 4 * TD_ARRAY_LEN(cases); i++, turn++) {
        const tiny_spec_t spec = {.type = cases[i / 4].type,
                                  .kv_heads = cases[i / 4].kv_heads,
                                  .kv_group = cases[i / 4].kv_group,
                                  .ff = cases[i / 4].ff};
        td_model_options_t options = options_of(cases[i / 4].devices);
        options.kv_codec = (td_kv_codec_t)(i % TD_KV_CODECS);
        options.precision = i % 2 == 0 ? TD_PRECISION_MIXED : TD_PRECISION_FAST;
        check_model(&spec, options, 21, 8, way_of(turn));
    }
}

static void test_chunks_and_long_contexts(void **state)
{
    static const uint32_t chunks[] = {1, 9, 64};

    (void)state;
    for (uint32_t i = 0; i < TD_ARRAY_LEN(chunks); i++) {
        const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .context = 2048, .kv_heads = 4};
        check_model(&spec, options_of(4), i == 0 ? 40 : 600, chunks[i], way_of(i));
    }
}

static void test_masks(void **state)
{
    static const char *const masks[] = {"window:24,3", "strided:20,32,4"};

    (void)state;
    for (uint32_t i = 0; i < TD_ARRAY_LEN(masks); i++) {
        const tiny_spec_t spec = {.type = TD_GGUF_Q8_0, .kv_heads = 3};
        td_model_options_t options = options_of(2);
        options.attention = masks[i];
        options.context_max = 1024;
        check_model(&spec, options, 150, 40, way_of(i));
    }
}

/* Blocks are the host's, and whole: what some devices have computed others go on with, as many or
 * not. */
static void test_any_number_feeds_any_other(void **state)
{
    static const uint32_t degrees[] = {1, 2, 3, 4};
    enum { PROMPT = 37, STEPS = 3 };
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .kv_heads = 4};
    float want[STEPS][TINY_VOCAB];
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    for (uint32_t turn = 0; turn <= TD_ARRAY_LEN(degrees) * TD_ARRAY_LEN(degrees); turn++) {
        const uint32_t pair = turn - 1; /* the first turn is the CPU's */
        const way_t way = way_of(turn);
        float ignored[TINY_VOCAB];
        rig_t rigs[2];
        set_way(&way);
        for (int side = 0; side < 2; side++) {
            td_model_options_t options =
                options_of(turn == 0 ? 1 : degrees[(side == 0 ? pair / 4 : pair) % 4]);
            options.backend = turn == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
            options.kv_codec = TD_KV_I8;
            rig_init(&rigs[side], gguf, &options, 1, PROMPT + STEPS);
        }
        prefill(&rigs[0], 0, PROMPT, 64, ignored);
        memcpy(rigs[1].pool, rigs[0].pool, rigs[0].pool_bytes);
        for (uint32_t step = 0; step < STEPS; step++) {
            const float *logits = NULL;
            set_row(&rigs[1], 0, 0, PROMPT + step, true);
            assert_int_equal(td_model_forward(rigs[1].model, rigs[1].pool, rigs[1].rows, 1, 0, NULL,
                                              NULL, &logits),
                             TD_OK);
            if (turn == 0) {
                memcpy(want[step], logits, sizeof(want[step]));
            } else {
                cuda_assert_same_bits(want[step], logits, TINY_VOCAB, "behind another's blocks");
            }
        }
        rig_fini(&rigs[0]);
        rig_fini(&rigs[1]);
    }
    if (emu_set_streams != NULL) {
        emu_set_streams(0);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* --- memory
 * ---------------------------------------------------------------------------------------
 */

/* The second device has less: loading works or says so, and leaves nothing on any. */
static void test_too_little_memory_on_one_device(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .kv_heads = 4};
    const td_model_options_t options = options_of(4);
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    if (emu_set_memory_of == NULL) {
        td_gguf_close(gguf);
        tiny_fini(&tiny);
        skip(); /* a device's memory is what it is */
    }
    assert_true(rig_load_with_growing_memory(gguf, &options, (int)options.devices.ids[1]) > 10);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* Each device has its share of weights and KV, and little besides. */
static void test_a_device_has_a_share_of_the_memory(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_F32, .kv_heads = 8, .ff = 1024, .untied = true};
    size_t used[4] = {0};
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    if (emu_memory_used_of == NULL) {
        td_gguf_close(gguf);
        tiny_fini(&tiny);
        skip();
    }
    for (uint32_t degree = 1; degree <= 4; degree *= 4) {
        td_model_options_t options = options_of(degree);
        td_model_t *model = NULL;
        options.rows_max = 1; /* weights and KV are what counts */
        options.logit_rows_max = 1;
        options.device_kv_bytes = (8u << 20) / degree;
        options.context_max = 64;
        assert_int_equal(td_model_load(gguf, &options, &model), TD_OK);
        for (uint32_t i = 0; i < degree; i++) {
            const size_t bytes = emu_memory_used_of((int)options.devices.ids[i]);
            if (degree == 1) {
                used[0] = bytes;
            } else { /* parts of rows and lists are each one's own */
                assert_in_range(bytes, used[0] / 5, used[0] / 2);
            }
        }
        td_model_destroy(model);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* --- shares --------------------------------------------------------------------------------------
 */

static void check_range(td_cuda_range_t range, uint32_t *next, uint32_t unit, uint32_t count)
{
    assert_int_equal(range.begin, *next);
    assert_true(range.begin == count || range.begin % unit == 0);
    assert_in_range(range.end, range.begin, count);
    *next = range.end;
}

/* Every head, element and token is somebody's, and nobody's is another's. */
static void test_shares_are_the_whole(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 600; i++) {
        const uint32_t kv_heads = 1 + i % 13;
        const td_model_info_t info = {.vocab_size = 1 + i * 37 % 900,
                                      .embed_dim = 8 + 8 * (i % 71),
                                      .ff_dim = 8 + 8 * (i % 97),
                                      .heads = kv_heads * (1 + i % 5),
                                      .kv = {.kv_heads = kv_heads}};
        for (uint32_t ranks = 1; ranks <= TD_MIN(kv_heads, TD_CUDA_RANKS_MAX); ranks++) {
            uint32_t at[5] = {0};
            for (uint32_t r = 0; r < ranks; r++) {
                const td_cuda_share_t share = td_cuda_share_of(&info, r, ranks);
                const uint32_t own = td_cuda_width(share.kv_heads);
                assert_in_range(own, kv_heads / ranks, (kv_heads + ranks - 1) / ranks);
                assert_int_equal(td_cuda_width(share.heads), own * (1 + i % 5));
                check_range(share.kv_heads, &at[0], 1, kv_heads);
                check_range(share.heads, &at[1], 1, info.heads);
                check_range(share.ff, &at[2], TD_CUDA_GROUP, info.ff_dim);
                check_range(share.embed, &at[3], TD_CUDA_PAIR, info.embed_dim);
                check_range(share.vocab, &at[4], TD_CUDA_PAIR, info.vocab_size);
            }
            assert_int_equal(at[0], kv_heads);
            assert_int_equal(at[1], info.heads);
            assert_int_equal(at[2], info.ff_dim);
            assert_int_equal(at[3], info.embed_dim);
            assert_int_equal(at[4], info.vocab_size);
        }
    }
}

/* --- lists of devices that cannot be -------------------------------------------------------------
 */

static void test_what_is_refused(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1};
    td_model_options_t options = options_of(3); /* of two KV heads */
    td_model_t *model = NULL;
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, &spec);

    (void)state;
    assert_int_equal(td_model_load(gguf, &options, &model), TD_ERR_UNSUPPORTED);
    options = options_of(2);
    options.devices.ids[1] = TD_MODEL_DEVICE_MAX; /* there is none */
    assert_int_equal(td_model_load(gguf, &options, &model), TD_ERR_UNSUPPORTED);
    options.devices.count = TD_MODEL_DEVICES_MAX + 1;
    assert_int_equal(td_model_load(gguf, &options, &model), TD_ERR_INVALID);
    assert_null(model);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_two_devices_have_the_bits_of_the_cpu),
    cmocka_unit_test(test_every_weight_type_and_precision),
    cmocka_unit_test(test_uneven_shares),
    cmocka_unit_test(test_chunks_and_long_contexts),
    cmocka_unit_test(test_masks),
    cmocka_unit_test(test_any_number_feeds_any_other),
    cmocka_unit_test(test_too_little_memory_on_one_device),
    cmocka_unit_test(test_a_device_has_a_share_of_the_memory),
    cmocka_unit_test(test_shares_are_the_whole),
    cmocka_unit_test(test_what_is_refused),
};
CUDA_TEST_MAIN(tests)
