/* Reads any bytes as a trace of tandem-sim, and shapes and replays what was accepted. Built with a
 * fuzzing engine, or alone: then it replays the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "router/sim_run.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/trace"
#define BLOCK_TOKENS 4u
#define RUN_TOKENS_MAX 4096u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_trace(const sim_trace_t *t)
{
    uint64_t blocks = 0;

    TD_ASSERT(t->count > 0);
    for (uint32_t i = 0; i < t->count; i++) {
        const sim_request_t *r = &t->requests[i];
        TD_ASSERT(i == 0 || r->arrival_ns >= t->requests[i - 1].arrival_ns);
        TD_ASSERT(r->input_tokens >= 1 && r->output_tokens >= 1);
        TD_ASSERT(r->first_block == blocks);
        TD_ASSERT(r->block_count == (r->input_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
        blocks += r->block_count;
    }
    TD_ASSERT(blocks == t->block_count);
    fuzz_touch(t->blocks, blocks * sizeof(*t->blocks));
}

/* Every request ends, whatever the trace is: sim_run() asserts that. */
static void run_trace(const sim_trace_t *t)
{
    static const sim_fault_t fault = {.at_ns = 1000000, .up_ns = 2000000, .is_prefill = true};
    sim_config_t config = {.prefill_count = 2,
                           .decode_count = 1,
                           .node_cache_tokens = 64,
                           .store_tokens = 64,
                           .keep_local = 1,
                           .faults = &fault,
                           .fault_count = 1};
    sim_result_t result;
    uint64_t tokens = 0;

    for (uint32_t i = 0; i < t->count; i++) {
        tokens += t->requests[i].input_tokens;
    }
    if (tokens <= RUN_TOKENS_MAX) { /* larger ones take time, and show nothing else */
        TD_ASSERT(sim_model_preset("smollm2-135m-2cores", &config.model) == TD_OK);
        TD_ASSERT(sim_run(&config, t, &result) == TD_OK);
        TD_ASSERT(result.completed + result.rejected + result.failed == t->count);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const sim_load_t load = {.arrivals = SIM_ARRIVALS_SPREAD, .rate_scale = 2};
    sim_trace_t trace;
    sim_trace_t untouched;
    sim_trace_t shaped = {0};
    char why[SIM_WHY_CHARS_MAX + 1] = "";
    td_status_t status = TD_OK;

    memset(&trace, 0x5a, sizeof(trace));
    memset(&untouched, 0x5a, sizeof(untouched));
    status = sim_trace_parse((const char *)data, size, BLOCK_TOKENS, &trace, why);
    if (status != TD_OK) {
        TD_ASSERT(status == TD_ERR_INVALID);
        TD_ASSERT(memcmp(&trace, &untouched, sizeof(trace)) == 0);
        TD_ASSERT(why[0] != '\0' && strlen(why) <= SIM_WHY_CHARS_MAX);
        for (const char *at = why; *at != '\0'; at++) {
            TD_ASSERT(*at >= 0x20 && *at < 0x7f);
        }
        return 0;
    }
    check_trace(&trace);
    TD_ASSERT(sim_trace_shape(&trace, &load, &shaped) == TD_OK);
    check_trace(&shaped);
    run_trace(&shaped);
    sim_trace_fini(&shaped);
    sim_trace_fini(&trace);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, false);
}
#endif
