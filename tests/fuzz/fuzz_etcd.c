/* Reads any bytes as an answer of etcd's JSON gateway. Built with a fuzzing engine, or alone: then
 * it replays the corpus (answers of an etcd 3.4) and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/coord/td_etcd_msg.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/etcd"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What goes into a log as a word. */
static void check_word(const char *text, size_t chars_max)
{
    TD_ASSERT(strlen(text) <= chars_max);
    for (; *text != '\0'; text++) {
        TD_ASSERT(*text > 0x20 && *text < 0x7f);
    }
}

static void check_printable(const char *text, size_t chars_max)
{
    TD_ASSERT(strlen(text) <= chars_max);
    for (; *text != '\0'; text++) {
        TD_ASSERT(*text >= 0x20 && *text < 0x7f && *text != '"');
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_etcd_answer_t answer;
    td_etcd_answer_t untouched;
    td_status_t status = TD_OK;
    char why[40];

    memset(&answer, 0x5a, sizeof(answer));
    memset(&untouched, 0x5a, sizeof(untouched));
    status = td_etcd_answer_decode((const char *)data, size, &answer);
    if (status == TD_OK) {
        TD_ASSERT(!answer.has_key || answer.create_revision > 0);
        TD_ASSERT(answer.lease <= INT64_MAX && answer.ttl_s <= INT64_MAX);
        check_word(answer.value, TD_ETCD_VALUE_CHARS_MAX);
        check_printable(answer.token, TD_ETCD_TOKEN_CHARS_MAX);
        TD_ASSERT(answer.entry_count <= TD_ETCD_ENTRIES_MAX);
        for (uint32_t i = 0; i < answer.entry_count; i++) { /* the routers that registered */
            check_word(answer.entries[i].key, TD_ETCD_KEY_CHARS_MAX);
            check_word(answer.entries[i].value, TD_ETCD_VALUE_CHARS_MAX);
        }
    } else {
        TD_ASSERT(status == TD_ERR_PROTOCOL || status == TD_ERR_TOO_LARGE);
        TD_ASSERT(memcmp(&answer, &untouched, sizeof(answer)) == 0);
    }
    td_etcd_error_text((const char *)data, size, why, sizeof(why));
    check_printable(why, sizeof(why) - 1);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
static bool replay_file(const char *dir, const char *name)
{
    static const uint8_t masks[FUZZ_MASKS] = {0x01, 0x02, 0x10, 0x80};
    static uint8_t bytes[TD_ETCD_ANSWER_BYTES_MAX];
    size_t len = 0;

    if (!fuzz_read(dir, name, bytes, sizeof(bytes), &len)) {
        return false;
    }
    fuzz_replay(bytes, len, masks, 1);
    return true;
}

int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, replay_file, false);
}
#endif
