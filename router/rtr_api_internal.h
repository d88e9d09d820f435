/* rtr_api_internal.h - what the parts of the API parser share: rtr_api.c reads fields,
 * rtr_prompts.c prompts, messages and ids, rtr_speculation.c what is drafted. */
#pragma once

#include <jansson.h>

#include "router/rtr_api.h"

typedef struct rtr_parse {
    const rtr_model_t *model;
    const json_t *root; /* an object */
    rtr_params_t *p;
    rtr_error_t *error;
} rtr_parse_t;

/** The field, or NULL when it is absent or null. */
const json_t *rtr_field(const rtr_parse_t *ps, const char *name);
/** "a string", "an array", ... */
const char *rtr_json_type(const json_t *value);
/** These fill the refusal and answer TD_ERR_INVALID. */
td_status_t rtr_refuse_type(const rtr_parse_t *ps, const char *name, const char *expected,
                            const json_t *got);
td_status_t rtr_refuse(const rtr_parse_t *ps, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
td_status_t rtr_no_memory(const rtr_parse_t *ps);
TD_MUST_CHECK td_status_t rtr_field_bool(const rtr_parse_t *ps, const char *name, bool *out);
/** An integer, also one written as 3.0. *out is untouched when the field is absent. */
TD_MUST_CHECK td_status_t rtr_field_int(const rtr_parse_t *ps, const char *name, int64_t lo,
                                        int64_t hi, int64_t *out, bool *present_out);
/** Owner: *ids_out is the caller's. Errors: TD_ERR_INVALID (refused), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_encode_text(const rtr_parse_t *ps, const char *name, const char *text,
                                          size_t len, uint32_t **ids_out, uint32_t *count_out);
/** Drafter, bounds of k, and the client's prediction. */
TD_MUST_CHECK td_status_t rtr_speculation_read(const rtr_parse_t *ps);
/** Prompts of all kinds into p->prompts, with max_tokens clamped. */
TD_MUST_CHECK td_status_t rtr_prompts_read(const rtr_parse_t *ps);
