#include "common/base/td_config.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cyaml/cyaml.h>

#include "common/base/td_base.h"

typedef struct config_value {
    char *text; /* owned; NULL = absent */
    uint64_t number;
    const char *source; /* static: "flag", "environment", "file", "default" */
} config_value_t;

struct td_config {
    const char *program;
    const char *summary;
    const td_option_t *options; /* borrowed, static tables */
    size_t count;
    config_value_t values[TD_CONFIG_OPTIONS_MAX];
};

static const td_option_t common_options[] = {
    {"config", TD_OPTION_TEXT, NULL, "YAML file with the same names as these flags"},
    {"print-config", TD_OPTION_BOOL, "false", "print every value with its source, and exit"},
    {"version", TD_OPTION_BOOL, "false", "print the version, and exit"},
    {"help", TD_OPTION_BOOL, "false", "print this text, and exit"},
};

static bool parse_bool(const char *text, bool *out)
{
    if (strcmp(text, "true") == 0 || strcmp(text, "yes") == 0 || strcmp(text, "1") == 0) {
        *out = true;
        return true;
    }
    if (strcmp(text, "false") == 0 || strcmp(text, "no") == 0 || strcmp(text, "0") == 0) {
        *out = false;
        return true;
    }
    return false;
}

static bool suffix_scale(td_option_type_t type, const char *suffix, uint64_t *scale)
{
    *scale = 1;
    if (*suffix == '\0') {
        return true;
    }
    if (type == TD_OPTION_BYTES && suffix[1] == '\0') {
        const char *units = "KMG";
        const char *at = strchr(units, toupper((unsigned char)suffix[0]));
        if (at != NULL) {
            *scale = 1ull << (10 * (at - units + 1));
            return true;
        }
    }
    if (type == TD_OPTION_MS) {
        *scale = strcmp(suffix, "s") == 0 ? 1000 : 1;
        return strcmp(suffix, "s") == 0 || strcmp(suffix, "ms") == 0;
    }
    return false;
}

td_status_t td_option_parse_u64(const td_option_t *option, const char *text, uint64_t *out)
{
    char *end = NULL;
    uint64_t value = 0;
    uint64_t scale = 1;

    if (!isdigit((unsigned char)text[0])) {
        return TD_ERR_INVALID;
    }
    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || !suffix_scale(option->type, end, &scale) ||
        __builtin_mul_overflow(value, scale, &value)) {
        return TD_ERR_INVALID;
    }
    if (value < option->min || (option->max != 0 && value > option->max)) {
        return TD_ERR_INVALID;
    }
    *out = value;
    return TD_OK;
}

static bool choice_allows(const char *choices, const char *text)
{
    for (const char *at = choices;; at++) {
        const size_t len = strcspn(at, "|");
        if (strncmp(at, text, len) == 0 && text[len] == '\0') {
            return true;
        }
        at += len;
        if (*at == '\0') {
            return false;
        }
    }
}

/* Says what was expected of an option; the text is for the error line. */
static void expected_text(const td_option_t *o, char *out, size_t len)
{
    static const char *const kinds[] = {
        "text",          "a number", "a size such as 64M", "a time such as 500ms",
        "true or false", "one of "};
    if (o->type == TD_OPTION_CHOICE) {
        (void)snprintf(out, len, "one of %s", o->choices);
    } else if (o->max != 0) {
        (void)snprintf(out, len, "%s from %llu to %llu", kinds[o->type], (unsigned long long)o->min,
                       (unsigned long long)o->max);
    } else {
        (void)snprintf(out, len, "%s", kinds[o->type]);
    }
}

static td_status_t value_set(td_config_t *config, size_t idx, const char *text, const char *source)
{
    const td_option_t *o = &config->options[idx];
    config_value_t *v = &config->values[idx];
    uint64_t number = 0;
    bool flag = false;
    bool ok = true;
    char *copy = NULL;
    char expected[256];

    switch (o->type) {
    case TD_OPTION_TEXT:
        break;
    case TD_OPTION_COUNT:
    case TD_OPTION_BYTES:
    case TD_OPTION_MS:
        ok = td_option_parse_u64(o, text, &number) == TD_OK;
        break;
    case TD_OPTION_BOOL:
        ok = parse_bool(text, &flag);
        number = flag;
        break;
    case TD_OPTION_CHOICE:
        ok = choice_allows(o->choices, text);
        break;
    }
    if (!ok) {
        expected_text(o, expected, sizeof(expected));
        (void)fprintf(stderr, "%s: %s (from the %s): '%s' is not %s\n", config->program, o->name,
                      source, text, expected);
        return TD_ERR_INVALID;
    }
    copy = td_strdup(text);
    if (copy == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    td_free(v->text);
    v->text = copy;
    v->number = number;
    v->source = source;
    return TD_OK;
}

static size_t option_find(const td_config_t *config, const char *name, size_t len)
{
    for (size_t i = 0; i < config->count; i++) {
        if (strlen(config->options[i].name) == len &&
            strncmp(config->options[i].name, name, len) == 0) {
            return i;
        }
    }
    return SIZE_MAX;
}

static void config_help(const td_config_t *config)
{
    printf("usage: %s [--name value | --name=value]...\n%s\n\n", config->program, config->summary);
    printf(
        "Sources: flags, then TANDEM_NAME in the environment, then the YAML file of --config.\n\n");
    for (size_t i = 0; i < config->count; i++) {
        const td_option_t *o = &config->options[i];
        printf("  --%-24s %s%s%s%s", o->name, o->help, o->def ? " [" : "", o->def ? o->def : "",
               o->def ? "]" : "");
        if (o->type == TD_OPTION_CHOICE) {
            printf(" (%s)", o->choices);
        }
        printf("\n");
    }
}

static void config_print(const td_config_t *config)
{
    for (size_t i = 0; i < config->count; i++) {
        const config_value_t *v = &config->values[i];
        if (v->text != NULL && option_find(config, "config", 6) != i &&
            strcmp(config->options[i].name, "print-config") != 0 &&
            strcmp(config->options[i].name, "version") != 0 &&
            strcmp(config->options[i].name, "help") != 0) {
            printf("%s: \"%s\" # %s\n", config->options[i].name, v->text, v->source);
        }
    }
}

static td_status_t read_flags(td_config_t *config, int argc, char **argv, bool only_file)
{
    size_t file_idx = option_find(config, "config", 6);

    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const char *eq = NULL;
        const char *value = NULL;
        size_t idx = 0;
        if (strncmp(arg, "--", 2) != 0) {
            (void)fprintf(stderr, "%s: '%s' is not a flag (see --help)\n", config->program, arg);
            return TD_ERR_INVALID;
        }
        arg += 2;
        eq = strchr(arg, '=');
        idx = option_find(config, arg, eq != NULL ? (size_t)(eq - arg) : strlen(arg));
        if (idx == SIZE_MAX) {
            (void)fprintf(stderr, "%s: unknown flag '--%s' (see --help)\n", config->program, arg);
            return TD_ERR_INVALID;
        }
        if (eq != NULL) {
            value = eq + 1;
        } else if (config->options[idx].type == TD_OPTION_BOOL &&
                   (i + 1 >= argc || strncmp(argv[i + 1], "--", 2) == 0)) {
            value = "true";
        } else if (i + 1 < argc) {
            value = argv[++i];
        } else {
            (void)fprintf(stderr, "%s: flag '--%s' needs a value\n", config->program, arg);
            return TD_ERR_INVALID;
        }
        if (!only_file || idx == file_idx) {
            TD_TRY(value_set(config, idx, value, "flag"));
        }
    }
    return TD_OK;
}

static td_status_t read_environment(td_config_t *config)
{
    for (size_t i = 0; i < config->count; i++) {
        char name[128] = "TANDEM_";
        size_t len = strlen(name);
        const char *value = NULL;
        for (const char *c = config->options[i].name; *c != '\0' && len + 1 < sizeof(name); c++) {
            name[len++] = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        }
        name[len] = '\0';
        value = getenv(name);
        if (value != NULL) {
            TD_TRY(value_set(config, i, value, "environment"));
        }
    }
    return TD_OK;
}

static const char *yaml_program; /* for the log callback, which has no room for it elsewhere */

static void yaml_log(cyaml_log_t level, void *ctx, const char *fmt, va_list args)
{
    (void)ctx;
    if (level >= CYAML_LOG_ERROR) {
        (void)fprintf(stderr, "%s: configuration file: ", yaml_program);
        (void)vfprintf(stderr, fmt, args);
    }
}

static td_status_t read_yaml(td_config_t *config, const char *path)
{
    cyaml_schema_field_t fields[TD_CONFIG_OPTIONS_MAX + 1];
    cyaml_schema_value_t top = {.type = CYAML_MAPPING, .flags = CYAML_FLAG_POINTER};
    cyaml_config_t how = {.log_fn = yaml_log,
                          .mem_fn = cyaml_mem,
                          .log_level = CYAML_LOG_ERROR,
                          .flags = CYAML_CFG_DEFAULT};
    char **loaded = NULL;
    cyaml_err_t err = CYAML_OK;
    td_status_t status = TD_OK;

    memset(fields, 0, sizeof(fields));
    for (size_t i = 0; i < config->count; i++) {
        fields[i].key = config->options[i].name;
        fields[i].data_offset = (uint32_t)(i * sizeof(char *));
        fields[i].value.type = CYAML_STRING;
        fields[i].value.flags = CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL;
        fields[i].value.data_size = 1;
        fields[i].value.string.max = 4096;
    }
    top.mapping.fields = fields;
    top.data_size = (uint32_t)(config->count * sizeof(char *));
    yaml_program = config->program;
    err = cyaml_load_file(path, &how, &top, (cyaml_data_t **)&loaded, NULL);
    if (err != CYAML_OK) {
        (void)fprintf(stderr, "%s: configuration file %s: %s\n", config->program, path,
                      cyaml_strerror(err));
        return TD_ERR_INVALID;
    }
    for (size_t i = 0; loaded != NULL && i < config->count && status == TD_OK; i++) {
        if (loaded[i] != NULL) {
            status = value_set(config, i, loaded[i], "file");
        }
    }
    (void)cyaml_free(&how, &top, loaded, 0);
    return status;
}

static td_status_t read_all(td_config_t *config, int argc, char **argv)
{
    size_t file_idx = option_find(config, "config", 6);

    for (size_t i = 0; i < config->count; i++) {
        if (config->options[i].def != NULL) {
            TD_TRY(value_set(config, i, config->options[i].def, "default"));
        }
    }
    TD_TRY(read_environment(config)); /* for TANDEM_CONFIG */
    TD_TRY(read_flags(config, argc, argv, true));
    if (config->values[file_idx].text != NULL) {
        TD_TRY(read_yaml(config, config->values[file_idx].text));
        TD_TRY(read_environment(config));
    }
    return read_flags(config, argc, argv, false);
}

td_config_next_t td_config_parse(const char *program, const char *summary,
                                 const td_option_t *options, size_t count, int argc, char **argv,
                                 td_config_t **config_out)
{
    static td_option_t table[TD_CONFIG_OPTIONS_MAX];
    size_t total = count + TD_ARRAY_LEN(common_options);
    td_config_t *config = NULL;

    TD_ASSERT(total <= TD_CONFIG_OPTIONS_MAX);
    *config_out = NULL;
    config = td_calloc(1, sizeof(*config));
    if (config == NULL) {
        (void)fprintf(stderr, "%s: out of memory\n", program);
        return TD_CONFIG_EXIT_USAGE;
    }
    memcpy(table, options, count * sizeof(*options));
    memcpy(table + count, common_options, sizeof(common_options));
    config->program = program;
    config->summary = summary;
    config->options = table;
    config->count = total;
    *config_out = config;
    if (read_all(config, argc, argv) != TD_OK) {
        return TD_CONFIG_EXIT_USAGE;
    }
    if (td_config_bool(config, "help")) {
        config_help(config);
        return TD_CONFIG_EXIT_OK;
    }
    if (td_config_bool(config, "version")) {
        printf("%s %s\n", program, TD_VERSION);
        return TD_CONFIG_EXIT_OK;
    }
    if (td_config_bool(config, "print-config")) {
        config_print(config);
        return TD_CONFIG_EXIT_OK;
    }
    return TD_CONFIG_RUN;
}

void td_config_destroy(td_config_t *config)
{
    if (config == NULL) {
        return;
    }
    for (size_t i = 0; i < config->count; i++) {
        td_free(config->values[i].text);
    }
    td_free(config);
}

static const config_value_t *value_get(const td_config_t *config, const char *name)
{
    size_t idx = option_find(config, name, strlen(name));
    TD_ASSERT(idx != SIZE_MAX);
    return &config->values[idx];
}

const char *td_config_text(const td_config_t *config, const char *name)
{
    return value_get(config, name)->text;
}

uint64_t td_config_u64(const td_config_t *config, const char *name)
{
    return value_get(config, name)->number;
}

bool td_config_bool(const td_config_t *config, const char *name)
{
    return value_get(config, name)->number != 0;
}
