/* td_gguf_truncate.h - a model file with only the first layers of another: a small draft model with
 * the same vocabulary. Source: the GGUF specification of the ggml project. Threads: any. */
#pragma once

#include <stdio.h>

#include "common/model/td_gguf.h"

/** Writes the file: every key as it was but the number of layers, and every tensor but those of the
 * layers behind the first `layers`.
 * Errors: TD_ERR_INVALID (no number of layers, or not 1..that many; logged), TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_gguf_truncate(const td_gguf_t *gguf, uint32_t layers, FILE *out);
