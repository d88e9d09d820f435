/* Blocks of KV between the pool and a staging buffer, and drawing tokens from logits. */
#include "common/model/cuda/td_cuda_math.cuh"

#define MOVE_THREADS 128u
#define MOVE_BYTES 4096u /* of a block of threads */

DEV_KERNEL __launch_bounds__(MOVE_THREADS, 1) td_cuda_move(const td_cuda_move_t p)
{
    uint8_t *const in_pool = p.pool + p.blocks[blockIdx.x] * p.block_bytes + p.offset;
    uint8_t *const staged = p.staging + blockIdx.x * p.bytes;
    const size_t begin = (size_t)blockIdx.y * MOVE_BYTES;
    const size_t end = begin + MOVE_BYTES < p.bytes ? begin + MOVE_BYTES : p.bytes;

    for (size_t i = begin + threadIdx.x * 16; i < end; i += MOVE_THREADS * 16) {
        const uint8_t *const from = (p.to_pool != 0 ? staged : in_pool) + i;
        uint8_t *const to = (p.to_pool != 0 ? in_pool : staged) + i;
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
    }
}
DEV_REGISTER(td_cuda_move);

/* --- drawing: td_sampler.c, operation by operation ----------------------------------------------
 */

#define DRAW_THREADS 256u
#define NO_TOKEN 0xffffffffu
#define LN2 0.6931471805599453
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define SQRT2 0x1.6a09e667f3bcdp+0

DEV uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* Of a normal number. */
DEV double log_of(double x)
{
    const uint64_t bits = dev_bits_from_double(x);
    int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
    double m = dev_double_from_bits((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    double sum = 0;

    if (m > SQRT2) {
        m *= 0.5;
        exponent++;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    for (int n = 21; n >= 3; n -= 2) {
        sum = (sum + 1.0 / static_cast<double>(n)) * z;
    }
    sum = 2.0 * s * sum + 2.0 * s;
    return static_cast<double>(exponent) * LN2_HIGH +
           (static_cast<double>(exponent) * LN2_LOW + sum);
}

DEV double gumbel(uint64_t bits)
{
    const double unit = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    return -log_of(-log_of(unit));
}

/* Not below gumbel(bits), at little cost. */
DEV double gumbel_bound(uint64_t bits)
{
    return static_cast<double>(dev_leading_zeros(~bits | 1ull << 11) + 1) * LN2 + 1e-9;
}

/* A thread's best so far. */
struct best {
    double score;
    uint32_t token;
};

DEV bool is_better(double score, uint32_t token, const best &than)
{
    return than.token == NO_TOKEN || score > than.score ||
           (score == than.score && token < than.token);
}

DEV_KERNEL __launch_bounds__(DRAW_THREADS, 1) td_cuda_draw(const td_cuda_draw_t p)
{
    __shared__ float maxima[DRAW_THREADS];
    __shared__ uint32_t broken[DRAW_THREADS];
    __shared__ double scores[DRAW_THREADS];
    __shared__ uint32_t tokens[DRAW_THREADS];
    const uint32_t row = blockIdx.x;
    const float *const logits = p.logits + (size_t)row * p.vocab;
    const float temperature = p.temperature[row];
    const float infinity = dev_float_from_bits(0x7f800000u);
    float maximum = -infinity;
    uint32_t bad = 0;
    best found = {0, NO_TOKEN};

    for (uint32_t i = threadIdx.x; i < p.vocab; i += DRAW_THREADS) {
        bad |= logits[i] < infinity ? 0u : 1u;
        maximum = logits[i] > maximum ? logits[i] : maximum;
    }
    maxima[threadIdx.x] = maximum;
    broken[threadIdx.x] = bad;
    __syncthreads();
    for (uint32_t i = 0; i < DRAW_THREADS; i++) {
        maximum = maxima[i] > maximum ? maxima[i] : maximum;
        bad |= broken[i];
    }
    for (uint32_t i = threadIdx.x; i < p.vocab; i += DRAW_THREADS) {
        if (!(temperature > 0)) {
            const double score = static_cast<double>(logits[i]);
            found = is_better(score, i, found) ? best{score, i} : found;
            continue;
        }
        const double value = static_cast<double>((logits[i] - maximum) / temperature);
        const uint64_t bits =
            mix(p.key[row] + (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull);
        if (!(value >= p.log_min_p[row]) || logits[i] == -infinity ||
            (found.token != NO_TOKEN && value + gumbel_bound(bits) < found.score)) {
            continue;
        }
        const double score = value + gumbel(bits);
        found = is_better(score, i, found) ? best{score, i} : found;
    }
    scores[threadIdx.x] = found.score;
    tokens[threadIdx.x] = found.token;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t i = 1; i < DRAW_THREADS; i++) {
            if (tokens[i] != NO_TOKEN && is_better(scores[i], tokens[i], found)) {
                found = {scores[i], tokens[i]};
            }
        }
        p.token[row] = bad != 0 || maximum == -infinity ? NO_TOKEN : found.token;
    }
}
DEV_REGISTER(td_cuda_draw);
