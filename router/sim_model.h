/* sim_model.h - how fast simulated nodes are. A preset, changed by a JSON file of the same names,
 * changed by options. DESIGN.md, "Simulator", derives the presets. Threads: owner. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

typedef struct sim_model {
    double prefill_prompt_ms; /* for each prompt, whatever its length */
    double prefill_token_us;  /* for each token that is computed */
    double prefill_pair_ns;   /* for each pair of a computed token and one that it sees */
    double decode_step_ms;    /* for each step of a batch */
    double decode_sequence_us;
    double decode_kv_token_ns; /* for each token of context that a step reads */
    double decode_kv_tokens;   /* that a decode node has room for */
    double kv_token_bytes;
    double layers;    /* KV leaves layer by layer, while the next one is computed */
    double link_gb_s; /* of a node, each way, in units of 10^9 bytes */
} sim_model_t;

#define SIM_PRESET_NAMES "llama70b-8xa800|smollm2-135m-2cores"
#define SIM_MODEL_FIELDS 10u
#define SIM_MODEL_WHY_CHARS_MAX 159

/** Errors: TD_ERR_INVALID (no such preset). */
TD_MUST_CHECK td_status_t sim_model_preset(const char *name, sim_model_t *out);
/** The name of a field, as in a file; with - for _ as an option. */
const char *sim_model_field(uint32_t index);
const char *sim_model_help(uint32_t index);
/** Errors: TD_ERR_INVALID (not a finite number, or out of the field's bounds; why says so). */
TD_MUST_CHECK td_status_t sim_model_set(sim_model_t *model, uint32_t index, double value,
                                        char why[SIM_MODEL_WHY_CHARS_MAX + 1]);
/** Changes what a JSON object names. Errors: TD_ERR_INVALID (why says what), TD_ERR_IO. */
TD_MUST_CHECK td_status_t sim_model_load(sim_model_t *model, const char *path,
                                         char why[SIM_MODEL_WHY_CHARS_MAX + 1]);
