/* Reads any bytes as a traceparent header. Built with a fuzzing engine, or alone: then it replays
 * the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/trace/td_span.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/traceparent"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_hex(const char *at, const uint8_t *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        char digits[3];
        (void)snprintf(digits, sizeof(digits), "%02x", bytes[i]);
        TD_ASSERT(memcmp(at + 2 * i, digits, 2) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = td_alloc(size + 1); /* of just its size, so that a sanitizer sees what is behind */
    td_trace_context_t context;
    td_trace_context_t again;
    td_span_t span = {0};
    uint8_t wire[TD_TRACE_WIRE_BYTES];

    TD_ASSERT(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    memset(&context, 0x5a, sizeof(context));
    if (td_trace_parse(text, &context)) {
        check_hex(text + 3, context.trace_id, TD_TRACE_ID_BYTES);
        check_hex(text + 36, context.span_id, TD_SPAN_ID_BYTES);
        td_trace_to_wire(&context, wire);
        td_trace_from_wire(wire, &again);
        TD_ASSERT(memcmp(again.trace_id, context.trace_id, TD_TRACE_ID_BYTES) == 0 &&
                  memcmp(again.span_id, context.span_id, TD_SPAN_ID_BYTES) == 0);
        td_span_begin(&span, &context, "fuzz", 1);
        td_span_text(&span, "text", text);
        TD_ASSERT(span.context.sampled == context.sampled);
    } else {
        TD_ASSERT(!context.sampled);
    }
    td_free(text);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, false);
}
#endif
