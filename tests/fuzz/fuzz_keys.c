/* Reads any bytes as a file of API keys, and asks it for keys that it has and has not. Built with a
 * fuzzing engine, or alone: then it replays the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/wire/td_bus.h"
#include "router/rtr_auth.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/keys"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Whose the key of the first line is that has one in the clear. */
static void ask(const rtr_auth_t *auth, const char *text)
{
    char header[2048];

    for (const char *at = text; *at != '\0'; at += strcspn(at, "\r\n"), at += strspn(at, "\r\n")) {
        const char *word = at + strspn(at, " \t");
        const size_t len = strcspn(word, " \t\r\n");
        if (len == 0 || at[0] == '#' || len > 1022 || strncmp(word, "blake2b:", 8) == 0) {
            continue;
        }
        (void)snprintf(header, sizeof(header), "Bearer %.*s", (int)len, word);
        TD_ASSERT(rtr_auth_check(auth, header) != NULL);
        (void)snprintf(header, sizeof(header), "bearer %.*s.", (int)len, word);
        (void)rtr_auth_check(auth, header);
        return;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {7};
    char *text = td_alloc(size + 1);
    rtr_tenants_t *tenants = NULL;
    rtr_auth_t *auth = NULL;
    fuzz_file_t file;

    TD_ASSERT(text != NULL && rtr_tenants_create(&tenants) == TD_OK);
    memcpy(text, data, size);
    text[size] = '\0';
    fuzz_file_make(&file, data, size);
    if (rtr_auth_load(file.path, secret, tenants, &auth) == TD_OK) {
        TD_ASSERT(rtr_auth_check(auth, NULL) == NULL);
        if (strlen(text) == size && strchr(text, '\r') == NULL) { /* lines as ask() sees them */
            ask(auth, text);
        }
        (void)rtr_auth_check(auth, text);
    }
    fuzz_file_end(&file);
    rtr_auth_destroy(auth);
    rtr_tenants_destroy(tenants);
    td_free(text);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, true);
}
#endif
