/* Reads any bytes as a program's configuration file, and as the value of each kind of flag. Built
 * with a fuzzing engine, or alone: then it replays the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_config.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/config"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const td_option_t options[] = {
    {"text", TD_OPTION_TEXT, NULL, "a text"},
    {"count", TD_OPTION_COUNT, "3", "a number", 1, 1000},
    {"bytes", TD_OPTION_BYTES, "8M", "a size", 1024, 1u << 30},
    {"ms", TD_OPTION_MS, "500ms", "a time", 0, 3600000},
    {"bool", TD_OPTION_BOOL, "false", "yes or no"},
    {"choice", TD_OPTION_CHOICE, "a", "a word", 0, 0, "a|bc|def"},
};

static void check_values(const td_config_t *config)
{
    const char *text = td_config_text(config, "text");
    const char *choice = td_config_text(config, "choice");

    fuzz_touch(text, text == NULL ? 0 : strlen(text));
    TD_ASSERT(td_config_u64(config, "count") >= 1 && td_config_u64(config, "count") <= 1000);
    TD_ASSERT(td_config_u64(config, "bytes") >= 1024 && td_config_u64(config, "bytes") <= 1u << 30);
    TD_ASSERT(td_config_u64(config, "ms") <= 3600000);
    TD_ASSERT(strcmp(choice, "a") == 0 || strcmp(choice, "bc") == 0 || strcmp(choice, "def") == 0);
}

static void parse(char *flag, char *value)
{
    char program[] = "fuzz";
    char *argv[] = {program, flag, value};
    td_config_t *config = NULL;

    if (td_config_parse("fuzz", "", options, TD_ARRAY_LEN(options), 3, argv, &config) ==
        TD_CONFIG_RUN) {
        check_values(config);
    }
    td_config_destroy(config);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = td_alloc(size + 1);
    fuzz_file_t file;
    char flag[16] = "--config";

    TD_ASSERT(text != NULL);
    fuzz_file_make(&file, data, size);
    parse(flag, file.path);
    fuzz_file_end(&file);
    memcpy(text, data, size);
    text[size] = '\0';
    for (size_t i = 0; size < 256 && i < TD_ARRAY_LEN(options); i++) {
        (void)snprintf(flag, sizeof(flag), "--%s", options[i].name);
        parse(flag, text);
    }
    td_free(text);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, true);
}
#endif
