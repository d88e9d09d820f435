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

void emu_set_devices(int count, bool peers) __attribute__((weak));
void emu_set_streams(uint32_t seed) __attribute__((weak));

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
    int there = 0;

    assert_int_equal(cudaGetDeviceCount(&there), cudaSuccess);
    options.device_count = devices;
    for (uint32_t i = 0; i < devices; i++) {
        options.devices[i] = (devices - 1 - i) % (uint32_t)there; /* in no order of theirs */
    }
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

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_two_devices_have_the_bits_of_the_cpu),
};
CUDA_TEST_MAIN(tests)
