#include "tests/bench/bench_options.h"

#include <getopt.h>
#include <stdio.h>

#include "common/base/td_base.h"
#include "tests/bench/bench.h"

#define HELP_VALUE 'h'
#define FIRST_VALUE 256 /* getopt's answer for option i is this + i */

static bool read_one(const bench_option_t *o, char *text)
{
    char name[64];

    switch (o->kind) {
    case BENCH_NUMBER:
        (void)snprintf(name, sizeof(name), "--%s", o->name);
        return bench_parse_u32(name, text, o->min, o->max, o->out);
    case BENCH_TEXT:
        *(const char **)o->out = text;
        return true;
    case BENCH_FLAG:
        *(bool *)o->out = true;
        return true;
    case BENCH_BACKEND:
        return bench_parse_backend(text, o->out);
    case BENCH_DEVICES:
        return bench_parse_devices(text, o->out);
    case BENCH_PRECISION:
        return bench_parse_precision(text, o->out);
    case BENCH_ISA:
        return bench_parse_isa(text, o->out);
    case BENCH_CODEC:
        return bench_parse_codec(text, o->out);
    case BENCH_ATTENTION:
        *(const char **)o->out = text;
        return bench_check_attention(text);
    case BENCH_OWN:
        return o->parse(text, o->out);
    }
    return false;
}

/* Anything but options, or a required one that is missing. */
static int check_rest(int argc, const char *command, const bench_option_t *options, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (options[i].required && (optind != argc || *(const char **)options[i].out == NULL)) {
            return bench_usage_error("%s needs --%s and nothing but options (see --help)", command,
                                     options[i].name);
        }
    }
    return optind == argc ? BENCH_EXIT_OK
                          : bench_usage_error("%s takes nothing but options (see --help)", command);
}

int bench_parse_options(int argc, char **argv, const char *command, void (*print_help)(void),
                        const bench_option_t *options, size_t count)
{
    struct option longs[BENCH_OPTIONS_MAX + 2] = {{0}};
    int opt = 0;

    TD_ASSERT(count <= BENCH_OPTIONS_MAX);
    for (size_t i = 0; i < count; i++) {
        longs[i] = (struct option){options[i].name,
                                   options[i].kind == BENCH_FLAG ? no_argument : required_argument,
                                   NULL, FIRST_VALUE + (int)i};
    }
    longs[count] = (struct option){"help", no_argument, NULL, HELP_VALUE};
    while ((opt = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
        if (opt == HELP_VALUE) {
            print_help();
            return BENCH_EXIT_HELP;
        }
        if (opt < FIRST_VALUE || !read_one(&options[opt - FIRST_VALUE], optarg)) {
            return BENCH_EXIT_USAGE; /* what is wrong was said */
        }
    }
    return check_rest(argc, command, options, count);
}
