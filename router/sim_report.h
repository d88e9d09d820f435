/* sim_report.h - what tandem-sim prints. Threads: owner. */
#pragma once

#include "common/base/td_buf.h"
#include "router/sim_run.h"

typedef struct sim_row {
    const char *policy; /* borrowed */
    sim_result_t result;
} sim_row_t;

/** One JSON object, with a line break behind it. timing: with what differs between runs. */
TD_MUST_CHECK td_status_t sim_report_json(const sim_row_t *row, bool timing, td_str_t *out);
/** A table with a line for each row. */
TD_MUST_CHECK td_status_t sim_report_table(const sim_row_t *rows, uint32_t count,
                                           const sim_config_t *config, td_str_t *out);
