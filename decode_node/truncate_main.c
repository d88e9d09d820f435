/* tandem-truncate: writes a model file with the first layers of another, to draft with. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/td_gguf_truncate.h"

static int usage(FILE *out)
{
    (void)fputs("usage: tandem-truncate --layers L IN OUT\n"
                "Writes to OUT the GGUF model IN with its first L layers only.\n",
                out);
    return 2;
}

static td_status_t truncate_file(const char *in, uint32_t layers, const char *out)
{
    td_gguf_t *gguf = NULL;
    td_status_t status = td_gguf_open(in, &gguf);
    FILE *file = NULL;

    if (status != TD_OK) {
        return status;
    }
    file = fopen(out, "wbx"); /* IN itself, or what somebody else needs, is never overwritten */
    if (file == NULL) {
        TD_LOG_ERROR("file not created", "file=%s errno=%d", out, errno);
        td_gguf_close(gguf);
        return TD_ERR_IO;
    }
    status = td_gguf_truncate(gguf, layers, file);
    if (fclose(file) != 0 && status == TD_OK) {
        TD_LOG_ERROR("file not written", "file=%s errno=%d", out, errno);
        status = TD_ERR_IO;
    }
    if (status != TD_OK) {
        (void)remove(out);
    }
    td_gguf_close(gguf);
    return status;
}

int main(int argc, char **argv)
{
    char *end = NULL;
    unsigned long layers = 0;

    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        (void)usage(stdout);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        (void)puts("tandem-truncate " TD_VERSION);
        return 0;
    }
    if (argc != 5 || strcmp(argv[1], "--layers") != 0) {
        return usage(stderr);
    }
    layers = strtoul(argv[2], &end, 10);
    if (argv[2][0] < '0' || argv[2][0] > '9' || *end != '\0' || layers > UINT32_MAX) {
        return usage(stderr);
    }
    return truncate_file(argv[3], (uint32_t)layers, argv[4]) == TD_OK ? 0 : 1;
}
