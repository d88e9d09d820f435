/* The network of the heads, its gradient, and Adam. A batch is runs of positions of some texts; a
 * chain of `steps` places begins at each, with the tokens that followed in the text. The loss of a
 * place is how far its distribution is from the one that the model has there, over some candidates
 * of the shortlist, and how far its state is from the model's.
 *
 * Products are the model's own float kernels, which give the same bits on every CPU, so a seed
 * names the heads that come of it (but for libm's exp). States and embeddings are scaled to a mean
 * square of one in here; an export takes that back. */
#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "decode_node/train_heads_internal.h"

#define ADAM_MEAN 0.9
#define ADAM_SQUARE 0.99
#define ADAM_TINY 1e-8
#define GRADIENT_MAX 1.0 /* its norm */
#define WARM_UP_BATCHES 32u
#define RATE_END 0.02     /* of the rate, at the end of the training */
#define STATE_WEIGHT 1.0f /* of the state's loss, beside the distribution's */

/* --- arithmetic over threads ------------------------------------------------------------------ */

/* y[row][output] = sum over k of x[row][k] * w(output, k). */
typedef struct product {
    train_net_t *n;
    const float *w;
    size_t stride;   /* of w */
    bool by_columns; /* w is [k][output], else [output][k] */
    uint32_t outputs;
    uint32_t inputs;
    float *x;
    uint32_t rows;
    float *y;
} product_t;

/* Outputs past the last are zero rows. */
static void pack_pair(const product_t *p, uint32_t pair, float *out)
{
    const uint32_t begin = pair * TD_CPU_PAIR;
    const uint32_t count = TD_MIN(TD_CPU_PAIR, p->outputs - begin);

    for (size_t k = 0; k < p->inputs; k++) {
        for (uint32_t r = 0; r < TD_CPU_PAIR; r++) {
            out[k * TD_CPU_PAIR + r] = r >= count      ? 0
                                       : p->by_columns ? p->w[k * p->stride + begin + r]
                                                       : p->w[(begin + r) * p->stride + k];
        }
    }
}

static void product_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    const product_t *p = ctx;
    const uint32_t pairs = (p->outputs + TD_CPU_PAIR - 1) / TD_CPU_PAIR;
    const uint32_t begin = td_threads_share(pairs, thread, threads);
    const uint32_t end = td_threads_share(pairs, thread + 1, threads);
    const td_cpu_matrix_t matrix = {.form = TD_CPU_F32,
                                    .outputs = p->outputs,
                                    .inputs = p->inputs,
                                    .panels = 2 * pairs,
                                    .pair_bytes = (size_t)p->inputs * TD_CPU_PAIR * sizeof(float),
                                    .bytes = (uint8_t *)p->n->packed};
    const td_cpu_acts_t acts = {.f32 = p->x};

    for (uint32_t i = begin; i < end; i++) {
        pack_pair(p, i, p->n->packed + (size_t)i * p->inputs * TD_CPU_PAIR);
    }
    if (begin < end) {
        p->n->ops->product(&matrix, &acts, p->rows, p->y, 2 * begin, 2 * end,
                           p->n->scratch[thread]);
    }
}

static void product(train_net_t *n, const product_t *p)
{
    product_t job = *p;

    job.n = n;
    td_threads_run(n->threads, product_thread, &job);
}

typedef struct flip {
    const float *from; /* [rows][columns] */
    float *to;         /* [columns][rows] */
    uint32_t rows;
    uint32_t columns;
} flip_t;

#define FLIP_BLOCK 32u

static void flip_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    const flip_t *f = ctx;
    const uint32_t end = td_threads_share(f->columns, thread + 1, threads);

    for (size_t c = td_threads_share(f->columns, thread, threads); c < end; c += FLIP_BLOCK) {
        for (size_t r = 0; r < f->rows; r += FLIP_BLOCK) {
            for (size_t i = c; i < TD_MIN(c + FLIP_BLOCK, (size_t)end); i++) {
                for (size_t j = r; j < TD_MIN(r + FLIP_BLOCK, (size_t)f->rows); j++) {
                    f->to[i * f->rows + j] = f->from[j * f->columns + i];
                }
            }
        }
    }
}

/* y[i][j] = sum over rows of left[row][i] * right[row][j]. */
static void product_of_columns(train_net_t *n, const float *left, uint32_t left_dim,
                               const float *right, uint32_t right_dim, uint32_t rows, float *y)
{
    flip_t f = {.from = left, .to = n->flipped, .rows = rows, .columns = left_dim};

    td_threads_run(n->threads, flip_thread, &f);
    product(n, &(product_t){.w = right,
                            .stride = right_dim,
                            .by_columns = true,
                            .outputs = right_dim,
                            .inputs = rows,
                            .x = n->flipped,
                            .rows = left_dim,
                            .y = y});
}

/* --- a batch ---------------------------------------------------------------------------------- */

/* Runs begin anywhere in a text where so much follows. */
static void draw_starts(train_net_t *n, uint64_t number)
{
    const uint64_t seed = train_random(n->o.seed, number);
    uint64_t drawn = 0;

    for (uint32_t i = 0; i < n->o.batch; i += TRAIN_RUN) {
        uint32_t row = 0;
        do {
            row = (uint32_t)(train_random(seed, drawn++) % n->data->rows);
        } while (n->data->follow[row] < (int32_t)(TRAIN_RUN - 1 + n->o.steps));
        for (uint32_t j = 0; j < TRAIN_RUN; j++) {
            n->starts[i + j] = row + j;
        }
    }
}

/* Where a position's goal at a step (from 1) stands among the teacher's rows. */
static uint32_t teacher_row(const train_net_t *n, uint32_t position, uint32_t step)
{
    return position / TRAIN_RUN * (TRAIN_RUN + n->o.steps) + position % TRAIN_RUN + step;
}

static void take_candidate(train_net_t *n, uint32_t place, uint32_t *count)
{
    if (place != TRAIN_NOT_LISTED && n->taken[place] == 0 && *count < n->o.candidates) {
        n->taken[place] = 1;
        n->candidates[(*count)++] = place;
    }
}

/* What came or would have come in these texts, and others at random, each for some more. */
static void draw_candidates(train_net_t *n, uint64_t number)
{
    const uint64_t seed = train_random(~n->o.seed, number);
    uint32_t count = 0;

    memset(n->taken, 0, n->o.shortlist);
    for (uint32_t i = 0; i < n->o.batch; i += TRAIN_RUN) {
        for (uint32_t j = 0; j < TRAIN_RUN + n->o.steps; j++) {
            take_candidate(n, n->place[n->data->tokens[n->starts[i] + j]], &count);
            take_candidate(n, n->place[n->data->best[n->starts[i] + j]], &count);
        }
    }
    n->forced = count;
    n->correction = count == n->o.candidates
                        ? 0
                        : logf((float)(n->o.shortlist - count) / (float)(n->o.candidates - count));
    for (uint64_t i = 0; count < n->o.candidates; i++) {
        take_candidate(n, (uint32_t)(train_random(seed, i) % n->o.shortlist), &count);
    }
    for (uint32_t i = 0; i < n->o.candidates; i++) {
        memcpy(n->picked_head + (size_t)i * n->dim, n->head + (size_t)n->candidates[i] * n->dim,
               n->dim * sizeof(*n->head));
    }
}

/* Logits become probabilities; answers the logarithm of what they were divided by. */
static float softmax(const train_net_t *n, float *row)
{
    float most = -INFINITY;
    float sum = 0;

    for (uint32_t i = 0; i < n->o.candidates; i++) {
        row[i] += i < n->forced ? 0 : n->correction;
        most = fmaxf(most, row[i]);
    }
    for (uint32_t i = 0; i < n->o.candidates; i++) {
        row[i] = expf(row[i] - most);
        sum += row[i];
    }
    for (uint32_t i = 0; i < n->o.candidates; i++) {
        row[i] /= sum;
    }
    return most + logf(sum);
}

static void teacher_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    train_net_t *n = ctx;
    const uint32_t end = td_threads_share(n->teacher_rows, thread + 1, threads);

    for (size_t i = td_threads_share(n->teacher_rows, thread, threads); i < end; i++) {
        (void)softmax(n, n->teacher + i * n->o.candidates);
    }
}

static void run_teacher(train_net_t *n)
{
    for (uint32_t i = 0; i < n->o.batch; i += TRAIN_RUN) {
        for (uint32_t j = 0; j < TRAIN_RUN + n->o.steps; j++) {
            float *goal = n->goals + (size_t)teacher_row(n, i, j) * n->dim;
            for (uint32_t k = 0; k < n->dim; k++) {
                goal[k] = n->state_scale * train_hidden(n->data, n->starts[i] + j, k);
            }
        }
    }
    product(n, &(product_t){.w = n->picked_head,
                            .stride = n->dim,
                            .outputs = n->o.candidates,
                            .inputs = n->dim,
                            .x = n->goals,
                            .rows = n->teacher_rows,
                            .y = n->teacher});
    td_threads_run(n->threads, teacher_thread, n);
}

static void put_embedding(const train_net_t *n, int32_t token, float *out)
{
    td_model_embedding(n->model, (uint32_t)token, out);
    for (uint32_t i = 0; i < n->dim; i++) {
        out[i] *= n->embed_scale;
    }
}

/* Inputs of a step (from 0) of so many chains; states: what they go on from. */
static void put_inputs(train_net_t *n, const train_data_t *d, const uint32_t *starts,
                       uint32_t count, uint32_t step, const float *states, float *x)
{
    for (uint32_t i = 0; i < count; i++, x += (size_t)TD_HEADS_INPUTS * n->dim) {
        memcpy(x, states + (size_t)i * n->dim, n->dim * sizeof(*x));
        put_embedding(n, d->tokens[starts[i] + step + 1], x + n->dim);
        put_embedding(n, d->tokens[starts[i] + step], x + 2 * (size_t)n->dim);
    }
}

static float silu(float x)
{
    return x / (1 + expf(-x));
}

typedef struct activation {
    const train_net_t *n;
    float *a; /* [rows][hidden_dim] */
    float *u;
    uint32_t rows;
} activation_t;

static void activate_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    const activation_t *job = ctx;
    const uint32_t width = job->n->o.hidden_dim;
    const uint32_t end = td_threads_share(job->rows, thread + 1, threads);

    for (size_t row = td_threads_share(job->rows, thread, threads); row < end; row++) {
        float *a = job->a + row * width;
        for (uint32_t i = 0; i < width; i++) {
            a[i] += job->n->w.in_bias[i];
            job->u[row * width + i] = silu(a[i]);
        }
    }
}

/* States of a step from its inputs. Shape: x [rows][3 * dim], a, u [rows][hidden_dim], z
 * [rows][dim]. */
static void forward(train_net_t *n, float *x, uint32_t rows, float *a, float *u, float *z)
{
    const uint32_t inputs = TD_HEADS_INPUTS * n->dim;
    activation_t job = {.n = n, .a = a, .u = u, .rows = rows};

    product(n, &(product_t){.w = n->w.in_weight,
                            .stride = inputs,
                            .outputs = n->o.hidden_dim,
                            .inputs = inputs,
                            .x = x,
                            .rows = rows,
                            .y = a});
    td_threads_run(n->threads, activate_thread, &job);
    product(n, &(product_t){.w = n->w.out_weight,
                            .stride = n->o.hidden_dim,
                            .outputs = n->dim,
                            .inputs = n->o.hidden_dim,
                            .x = u,
                            .rows = rows,
                            .y = z});
    for (size_t row = 0; row < rows; row++) {
        for (uint32_t i = 0; i < n->dim; i++) {
            z[row * n->dim + i] += x[row * inputs + i] + n->w.out_bias[i];
        }
    }
}

typedef struct loss_job {
    train_net_t *n;
    uint32_t step;
} loss_job_t;

/* The logits of a step's chains become the gradient of its loss. */
static void loss_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    const loss_job_t *job = ctx;
    train_net_t *n = job->n;
    const uint32_t count = n->o.candidates;
    const float weight = 1.0f / (float)(n->o.batch * n->o.steps);
    const uint32_t end = td_threads_share(n->o.batch, thread + 1, threads);

    for (size_t i = td_threads_share(n->o.batch, thread, threads); i < end; i++) {
        const float *goal = n->teacher + (size_t)teacher_row(n, (uint32_t)i, job->step + 1) * count;
        float *row = n->logits + i * count;
        double loss = 0;
        (void)softmax(n, row);
        for (uint32_t k = 0; k < count; k++) {
            if (goal[k] > 0) {
                loss += (double)(goal[k] * (logf(goal[k]) - logf(fmaxf(row[k], 1e-30f))));
            }
            row[k] = (row[k] - goal[k]) * weight;
        }
        n->losses[i].distribution += loss / n->o.steps;
    }
}

/* The gradient of a step's states by its own loss; by the steps behind it comes in addition. */
static void state_gradient(train_net_t *n, uint32_t step)
{
    const size_t at = (size_t)step * n->o.batch * n->dim;
    const float weight = STATE_WEIGHT / (float)(n->o.batch * n->o.steps);
    loss_job_t job = {.n = n, .step = step};

    product(n, &(product_t){.w = n->picked_head,
                            .stride = n->dim,
                            .outputs = n->o.candidates,
                            .inputs = n->dim,
                            .x = n->z + at,
                            .rows = n->o.batch,
                            .y = n->logits});
    td_threads_run(n->threads, loss_thread, &job);
    product(n, &(product_t){.w = n->picked_head,
                            .stride = n->dim,
                            .by_columns = true,
                            .outputs = n->dim,
                            .inputs = n->o.candidates,
                            .x = n->logits,
                            .rows = n->o.batch,
                            .y = n->dz + at});
    for (uint32_t i = 0; i < n->o.batch; i++) {
        const float *goal = n->goals + (size_t)teacher_row(n, i, step + 1) * n->dim;
        const size_t row = at + (size_t)i * n->dim;
        for (uint32_t k = 0; k < n->dim; k++) {
            const float away = n->z[row + k] - goal[k];
            const float most = fmaxf(-1, fminf(1, away));
            n->losses[i].state += (double)(most * (away - most / 2)) / n->dim / n->o.steps;
            n->dz[row + k] += weight * most / (float)n->dim;
        }
    }
}

/* From the states' gradient of a step to that of what it began with. */
static void backward(train_net_t *n, uint32_t step)
{
    const uint32_t batch = n->o.batch;
    const uint32_t width = n->o.hidden_dim;
    const size_t at = (size_t)step * batch;
    float *du = n->da + at * width;

    product(n, &(product_t){.w = n->w.out_weight,
                            .stride = width,
                            .by_columns = true,
                            .outputs = width,
                            .inputs = n->dim,
                            .x = n->dz + at * n->dim,
                            .rows = batch,
                            .y = du});
    for (size_t i = 0; i < (size_t)batch * width; i++) {
        const float a = n->a[at * width + i];
        const float gate = 1 / (1 + expf(-a));
        du[i] *= gate * (1 + a * (1 - gate));
    }
    if (step == 0) {
        return;
    }
    product(n, &(product_t){.w = n->w.in_weight,
                            .stride = (size_t)TD_HEADS_INPUTS * n->dim,
                            .by_columns = true,
                            .outputs = n->dim,
                            .inputs = width,
                            .x = du,
                            .rows = batch,
                            .y = n->dx});
    for (size_t i = 0; i < (size_t)batch * n->dim; i++) {
        n->dz[(at - batch) * n->dim + i] += n->dz[at * n->dim + i] + n->dx[i];
    }
}

static void sum_rows(const float *rows, uint32_t count, uint32_t width, float *out)
{
    memset(out, 0, width * sizeof(*out));
    for (size_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < width; k++) {
            out[k] += rows[i * width + k];
        }
    }
}

static void weight_gradients(train_net_t *n)
{
    const uint32_t positions = n->o.steps * n->o.batch;

    product_of_columns(n, n->da, n->o.hidden_dim, n->x, TD_HEADS_INPUTS * n->dim, positions,
                       n->g.in_weight);
    product_of_columns(n, n->dz, n->dim, n->u, n->o.hidden_dim, positions, n->g.out_weight);
    sum_rows(n->da, positions, n->o.hidden_dim, n->g.in_bias);
    sum_rows(n->dz, positions, n->dim, n->g.out_bias);
}

static void run_chains(train_net_t *n)
{
    const uint32_t batch = n->o.batch;
    const size_t inputs = (size_t)TD_HEADS_INPUTS * n->dim;

    /* The states that chains begin with, where the first step's gradient will be. */
    for (uint32_t i = 0; i < batch; i++) {
        memcpy(n->dx + (size_t)i * n->dim, n->goals + (size_t)teacher_row(n, i, 0) * n->dim,
               n->dim * sizeof(*n->dx));
    }
    for (uint32_t step = 0; step < n->o.steps; step++) {
        const size_t at = (size_t)step * batch;
        put_inputs(n, n->data, n->starts, batch, step,
                   step == 0 ? n->dx : n->z + (at - batch) * n->dim, n->x + at * inputs);
        forward(n, n->x + at * inputs, batch, n->a + at * n->o.hidden_dim,
                n->u + at * n->o.hidden_dim, n->z + at * n->dim);
    }
    memset(n->losses, 0, batch * sizeof(*n->losses));
    for (uint32_t step = 0; step < n->o.steps; step++) {
        state_gradient(n, step);
    }
    for (uint32_t step = n->o.steps; step-- > 0;) {
        backward(n, step);
    }
    weight_gradients(n);
}

typedef struct adam {
    train_net_t *n;
    double rate;
    double mean_part;   /* of the means, how much has come so far */
    double square_part; /* of the squares */
    float gradient_scale;
} adam_t;

static void adam_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    const adam_t *a = ctx;
    float *const *memory = a->n->memory;
    const size_t begin = a->n->param_count * thread / threads;
    const size_t end = a->n->param_count * (thread + 1) / threads;
    const float rate = (float)(a->rate / a->mean_part);
    const float square_part = (float)a->square_part;

    for (size_t i = begin; i < end; i++) {
        const float g = memory[1][i] * a->gradient_scale;
        memory[2][i] += (float)(1 - ADAM_MEAN) * (g - memory[2][i]);
        memory[3][i] += (float)(1 - ADAM_SQUARE) * (g * g - memory[3][i]);
        memory[0][i] -=
            rate * memory[2][i] / (sqrtf(memory[3][i] / square_part) + (float)ADAM_TINY);
    }
}

static double rate_of(const train_net_t *n, uint64_t number)
{
    const double done = (double)number / (double)TD_MAX(n->o.batches, 1u);
    const double fall = RATE_END + (1 - RATE_END) * 0.5 * (1 + cos(M_PI * fmin(done, 1)));
    const double rise = fmin(1, (double)(number + 1) / WARM_UP_BATCHES);

    return n->o.learning_rate * rise * fall;
}

static void adam_step(train_net_t *n, uint64_t number)
{
    const double times = (double)number + 1;
    double norm = 0;
    adam_t a = {.n = n,
                .rate = rate_of(n, number),
                .mean_part = 1 - pow(ADAM_MEAN, times),
                .square_part = 1 - pow(ADAM_SQUARE, times)};

    for (size_t i = 0; i < n->param_count; i++) {
        norm += (double)n->memory[1][i] * (double)n->memory[1][i];
    }
    a.gradient_scale = (float)fmin(1, GRADIENT_MAX / (sqrt(norm) + 1e-20));
    td_threads_run(n->threads, adam_thread, &a);
}

void train_net_gradient(train_net_t *n, uint64_t number, train_loss_t *out)
{
    *out = (train_loss_t){0};
    draw_starts(n, number);
    draw_candidates(n, number);
    run_teacher(n);
    run_chains(n);
    for (uint32_t i = 0; i < n->o.batch; i++) {
        out->distribution += n->losses[i].distribution / n->o.batch;
        out->state += STATE_WEIGHT * n->losses[i].state / n->o.batch;
    }
}

void train_net_batch(train_net_t *n, uint64_t number, train_loss_t *out)
{
    train_net_gradient(n, number, out);
    adam_step(n, number);
}

float *train_net_weights(train_net_t *n, const float **gradient_out, size_t *count_out)
{
    *gradient_out = n->memory[1];
    *count_out = n->param_count;
    return n->memory[0];
}

/* --- how good it is --------------------------------------------------------------------------- */

static uint32_t best_of(const float *row, uint32_t count)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < count; i++) {
        best = row[i] > row[best] ? i : best;
    }
    return best;
}

static void score_batch(train_net_t *n, const train_data_t *d, uint32_t count, train_score_t *out)
{
    for (uint32_t i = 0; i < count; i++) {
        n->alive[i] = true;
        for (uint32_t k = 0; k < n->dim; k++) {
            n->z[(size_t)i * n->dim + k] = n->state_scale * train_hidden(d, n->starts[i], k);
        }
    }
    for (uint32_t step = 0; step < n->o.steps; step++) {
        put_inputs(n, d, n->starts, count, step, n->z, n->x);
        forward(n, n->x, count, n->a, n->u, n->z);
        product(n, &(product_t){.w = n->head,
                                .stride = n->dim,
                                .outputs = n->o.shortlist,
                                .inputs = n->dim,
                                .x = n->z,
                                .rows = count,
                                .y = n->logits});
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t got =
                n->tokens[best_of(n->logits + (size_t)i * n->o.shortlist, n->o.shortlist)];
            const bool right = got == (uint32_t)d->best[n->starts[i] + step + 1];
            out->alive[step] += n->alive[i];
            out->any[step] += right;
            n->alive[i] = n->alive[i] && right;
            out->right[step] += n->alive[i];
        }
    }
    out->rows += count;
}

void train_net_score(train_net_t *n, const train_data_t *data, train_score_t *out)
{
    uint32_t count = 0;

    *out = (train_score_t){0};
    for (uint32_t row = 0; row < data->rows; row++) {
        if (data->follow[row] >= (int32_t)n->o.steps) {
            n->starts[count++] = row;
        }
        if (count == n->o.batch || (count > 0 && row + 1 == data->rows)) {
            score_batch(n, data, count, out);
            count = 0;
        }
    }
}
