/* Reads any bytes as what a server sends to the benchmark client: an event stream in one piece and
 * in small ones, which has to come to the same, and a message of HTTP. Built with a fuzzing engine,
 * or alone: then it replays the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_http.h"
#include "tests/bench/bench_stream.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/stream"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The program's own is in its main file. */
int bench_usage_error(const char *fmt, ...)
{
    (void)fmt;
    return BENCH_EXIT_FAILED;
}

static void read_stream(const char *bytes, size_t len, size_t step, bench_stream_t *out)
{
    *out = (bench_stream_t){0};
    for (size_t at = 0; at < len; at += step) {
        bench_stream_take(out, bytes + at, TD_MIN(step, len - at));
    }
    TD_ASSERT(out->text.len <= BENCH_TEXT_BYTES_MAX && out->line.len <= BENCH_LINE_BYTES_MAX);
    TD_ASSERT(out->prompt_tokens <= BENCH_TOKENS_MAX && out->completion_tokens <= BENCH_TOKENS_MAX);
    TD_ASSERT(out->pieces == 0 || out->text.len > 0);
    TD_ASSERT(strlen(out->error) < sizeof(out->error));
    for (const char *c = out->error; *c != '\0'; c++) {
        TD_ASSERT(*c >= 0x20 && *c < 0x7f);
    }
}

static void end_stream(bench_stream_t *s)
{
    td_str_fini(&s->line);
    td_str_fini(&s->text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *bytes = (const char *)data;
    bench_http_message_t message = {0};
    bench_stream_t whole;
    bench_stream_t parts;

    read_stream(bytes, size, size + 1, &whole);
    read_stream(bytes, size, 7, &parts);
    TD_ASSERT(strcmp(whole.error, parts.error) == 0 && whole.done == parts.done);
    TD_ASSERT(whole.text.len == parts.text.len && whole.pieces == parts.pieces);
    TD_ASSERT(whole.text.len == 0 ||
              memcmp(whole.text.bytes, parts.text.bytes, whole.text.len) == 0);
    end_stream(&whole);
    end_stream(&parts);
    if (bench_http_find(bytes, size, &message) == TD_OK) {
        TD_ASSERT(message.head_bytes <= message.bytes && message.bytes <= size);
    }
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, false);
}
#endif
