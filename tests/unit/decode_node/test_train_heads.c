/* Training heads: the gradient is the loss's, what is learned is learned, and a training that was
 * broken off ends as one that was not. On a small model's own states. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <unistd.h>

#include "decode_node/train_heads.h"
#include "tests/unit/model/test_model_rig.h"

#define TEXTS 8u
#define TEXT_ROWS 64u
#define BATCHES 600u

typedef struct bench {
    tiny_t tiny;
    td_gguf_t *gguf;
    rig_t rig;
    train_data_t data;
    train_options_t options;
} bench_t;

/* Texts that go round: what follows is decided by the tokens alone. */
static void fill_data(bench_t *b)
{
    train_data_t *d = &b->data;
    const float *logits = NULL;

    *d = (train_data_t){.embed_dim = TINY_DIM, .rows = TEXTS * TEXT_ROWS};
    d->tokens = td_calloc(d->rows, sizeof(*d->tokens));
    d->best = td_calloc(d->rows, sizeof(*d->best));
    d->follow = td_calloc(d->rows, sizeof(*d->follow));
    d->hidden = td_calloc((size_t)d->rows * TINY_DIM, sizeof(*d->hidden));
    for (uint32_t row = 0; row < d->rows; row++) {
        const uint32_t at = row % TEXT_ROWS;
        const float *hidden = NULL;
        set_row(&b->rig, 0, 0, at, true);
        b->rig.rows[0].token = (row / TEXT_ROWS * 5 + at * 7) % TINY_VOCAB;
        assert_int_equal(
            td_model_forward(b->rig.model, b->rig.pool, b->rig.rows, 1, 0, NULL, NULL, &logits),
            TD_OK);
        hidden = td_model_hidden(b->rig.model);
        d->tokens[row] = (int32_t)b->rig.rows[0].token;
        d->follow[row] = (int32_t)(TEXT_ROWS - 1 - at);
        for (uint32_t i = 1; i < TINY_VOCAB; i++) {
            d->best[row] = logits[i] > logits[d->best[row]] ? (int32_t)i : d->best[row];
        }
        for (uint32_t i = 0; i < TINY_DIM; i++) {
            d->hidden[row * TINY_DIM + i] = td_f16_from_f32(hidden[i]);
        }
    }
}

static void setup(bench_t *b)
{
    const td_model_options_t options = default_options();

    memset(b, 0, sizeof(*b));
    tiny_init(&b->tiny, &(tiny_spec_t){.type = TD_GGUF_F32});
    assert_int_equal(td_gguf_open_bytes(b->tiny.bytes, b->tiny.len, &b->gguf), TD_OK);
    rig_init(&b->rig, b->gguf, &options, 1, TINY_CONTEXT);
    fill_data(b);
    b->options = (train_options_t){.steps = 3,
                                   .hidden_dim = 64,
                                   .shortlist = 48,
                                   .candidates = 32,
                                   .batch = 64,
                                   .threads = 2,
                                   .seed = 3,
                                   .learning_rate = 0.01,
                                   .batches = BATCHES};
}

static void teardown(bench_t *b)
{
    train_data_fini(&b->data);
    rig_fini(&b->rig);
    td_gguf_close(b->gguf);
    tiny_fini(&b->tiny);
}

static train_net_t *create(const bench_t *b)
{
    train_net_t *net = NULL;
    assert_int_equal(train_net_create(b->rig.model, &b->data, &b->options, &net), TD_OK);
    return net;
}

static double loss_of(train_net_t *net, uint64_t number)
{
    train_loss_t loss;
    train_net_gradient(net, number, &loss);
    return loss.distribution + loss.state;
}

/* Along any direction the loss changes as the gradient says. */
static void test_gradient_is_the_slope(void **state)
{
    const float step = 2e-3f;
    const float *gradient = NULL;
    size_t count = 0;
    float *weights = NULL;
    float *before = NULL;
    float *direction = NULL;
    train_net_t *net = NULL;
    bench_t b;
    (void)state;

    setup(&b);
    net = create(&b);
    for (uint64_t i = 0; i < 20; i++) { /* away from where half of the gradient is zero */
        train_loss_t loss;
        train_net_batch(net, i, &loss);
    }
    weights = train_net_weights(net, &gradient, &count);
    before = td_calloc(count, sizeof(*before));
    direction = td_calloc(count, sizeof(*direction));
    for (uint32_t turn = 0; turn < 6; turn++) {
        double slope = 0;
        double up = 0;
        double down = 0;
        (void)loss_of(net, 77);
        memcpy(before, weights, count * sizeof(*before));
        for (size_t i = 0; i < count; i++) { /* with the gradient, and somewhat aside */
            const uint64_t bits = (i * 2654435761u + turn * 40503u) >> 7;
            direction[i] = gradient[i] + (bits % 2 == 0 ? 1.0f : -1.0f) * 1e-3f;
            slope += (double)gradient[i] * (double)direction[i];
        }
        for (size_t i = 0; i < count; i++) {
            weights[i] = before[i] + step * direction[i];
        }
        up = loss_of(net, 77);
        for (size_t i = 0; i < count; i++) {
            weights[i] = before[i] - step * direction[i];
        }
        down = loss_of(net, 77);
        memcpy(weights, before, count * sizeof(*before));
        assert_true(slope > 1e-3);
        assert_true(fabs((up - down) / (2 * (double)step) - slope) < 0.02 * slope);
    }
    td_free(before);
    td_free(direction);
    train_net_destroy(net);
    teardown(&b);
}

static void test_training_learns_and_goes_on(void **state)
{
    const float *gradient = NULL;
    train_net_t *nets[2] = {NULL, NULL};
    float *weights[2] = {NULL, NULL};
    train_loss_t loss = {0};
    train_score_t score;
    uint64_t done = 0;
    size_t count = 0;
    double first = 0;
    td_heads_t *heads = NULL;
    char path[64] = "/tmp/test-train-XXXXXX";
    bench_t b;
    (void)state;

    assert_int_equal(close(mkstemp(path)), 0);
    setup(&b);
    nets[0] = create(&b);
    nets[1] = create(&b);
    for (uint64_t i = 0; i < BATCHES; i++) {
        train_net_batch(nets[0], i, &loss);
        first = i == 0 ? loss.distribution : first;
        if (i + 1 == BATCHES / 2) {
            assert_int_equal(train_net_save(nets[0], path, "half", i + 1), TD_OK);
        }
    }
    assert_true(loss.distribution < first / 5);
    train_net_score(nets[0], &b.data, &score);
    assert_int_equal(score.rows, TEXTS * (TEXT_ROWS - 3));
    assert_int_equal(score.alive[0], score.rows);
    assert_int_equal(score.alive[1], score.right[0]);
    assert_true(score.right[0] > score.rows / 2 && score.right[2] > score.rows / 6);

    /* Another one goes on from the half, and comes to the same weights. */
    assert_int_equal(train_net_load(nets[1], path, "other", &done), TD_ERR_NOT_FOUND);
    assert_int_equal(train_net_load(nets[1], "/dev/null/x", "half", &done), TD_ERR_NOT_FOUND);
    assert_int_equal(train_net_load(nets[1], path, "half", &done), TD_OK);
    assert_int_equal(done, BATCHES / 2);
    for (uint64_t i = done; i < BATCHES; i++) {
        train_net_batch(nets[1], i, &loss);
    }
    weights[0] = train_net_weights(nets[0], &gradient, &count);
    weights[1] = train_net_weights(nets[1], &gradient, &count);
    assert_same_bits(weights[0], weights[1], count);

    /* What is exported drafts as it was scored: the first place, for some positions. */
    assert_int_equal(train_net_export(nets[0], path, b.rig.info->fingerprint, &score), TD_OK);
    assert_int_equal(td_heads_load(path, b.rig.model, 1, &heads), TD_OK);
    {
        uint64_t right = 0;
        uint32_t listed = 0;
        const uint32_t *tokens = td_heads_tokens(heads, &listed);
        for (uint32_t row = 0; row < b.data.rows; row++) {
            float hidden[TINY_DIM];
            const td_heads_row_t at = {hidden, (uint32_t)b.data.tokens[TD_MIN(row + 1, 511u)],
                                       (uint32_t)b.data.tokens[row]};
            const float *logits = NULL;
            uint32_t best = 0;
            for (uint32_t i = 0; i < TINY_DIM; i++) {
                hidden[i] = td_f32_from_f16(b.data.hidden[row * TINY_DIM + i]);
            }
            if (b.data.follow[row] < 3) {
                continue;
            }
            td_heads_step(heads, &at, 1, &logits);
            for (uint32_t i = 1; i < listed; i++) {
                best = logits[i] > logits[best] ? i : best;
            }
            right += tokens[best] == (uint32_t)b.data.best[row + 1];
        }
        assert_true(right + 12 > score.right[0] && right < score.right[0] + 12);
    }
    td_heads_destroy(heads);
    train_net_destroy(nets[0]);
    train_net_destroy(nets[1]);
    assert_int_equal(remove(path), 0);
    teardown(&b);
}

static void test_data_is_checked(void **state)
{
    train_data_t again;
    train_net_t *net = NULL;
    char path[64] = "/tmp/test-train-XXXXXX";
    bench_t b;
    (void)state;

    assert_int_equal(close(mkstemp(path)), 0);
    setup(&b);
    assert_int_equal(train_data_save(path, "this", &b.data), TD_OK);
    assert_int_equal(train_data_load(path, "that", TINY_DIM, &again), TD_ERR_NOT_FOUND);
    assert_int_equal(train_data_load(path, "this", TINY_DIM + 8, &again), TD_ERR_INVALID);
    assert_int_equal(train_data_load(path, "this", TINY_DIM, &again), TD_OK);
    assert_int_equal(again.rows, b.data.rows);
    assert_memory_equal(again.tokens, b.data.tokens, again.rows * sizeof(*again.tokens));
    assert_memory_equal(again.best, b.data.best, again.rows * sizeof(*again.best));
    assert_memory_equal(again.follow, b.data.follow, again.rows * sizeof(*again.follow));
    assert_memory_equal(again.hidden, b.data.hidden,
                        (size_t)again.rows * TINY_DIM * sizeof(*again.hidden));
    train_data_fini(&again);
    b.data.best[9] = TINY_VOCAB;
    assert_int_equal(train_net_create(b.rig.model, &b.data, &b.options, &net), TD_ERR_INVALID);
    b.data.best[9] = 0;
    b.data.follow[b.data.rows - 1] = 1;
    assert_int_equal(train_net_create(b.rig.model, &b.data, &b.options, &net), TD_ERR_INVALID);
    b.data.follow[b.data.rows - 1] = 0;
    b.options.steps = TRAIN_STEPS_MAX;
    assert_int_equal(train_net_create(b.rig.model, &b.data, &b.options, &net), TD_OK);
    train_net_destroy(net);
    assert_int_equal(remove(path), 0);
    teardown(&b);
}

static void test_prompts_differ(void **state)
{
    const uint32_t count = train_prompts(false);
    const uint32_t held_out = train_prompts(true);
    char first[512];
    char other[512];
    bool is_chat = false;
    (void)state;

    assert_true(count > 2000 && held_out > 200);
    for (uint32_t i = 0; i < held_out; i += 7) {
        train_prompt(i, true, first, sizeof(first), &is_chat);
        assert_true(strlen(first) > 10 && strchr(first, '%') == NULL);
        for (uint32_t j = 0; j < count; j++) {
            train_prompt(j, false, other, sizeof(other), &is_chat);
            assert_string_not_equal(first, other);
        }
    }
    train_prompt(1, false, first, 8, &is_chat);
    assert_int_equal(strlen(first), 7);
    assert_false(is_chat);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradient_is_the_slope),
        cmocka_unit_test(test_training_learns_and_goes_on),
        cmocka_unit_test(test_data_is_checked),
        cmocka_unit_test(test_prompts_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
