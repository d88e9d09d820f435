/* td_coord_internal.h - what the backends of td_coord share. Threads: loop. */
#pragma once

#include "common/coord/td_coord.h"

typedef struct td_coord_ops {
    void (*destroy)(td_coord_t *coord);
    void (*campaign)(td_coord_t *coord);
    void (*resign)(td_coord_t *coord);
    bool (*is_resigned)(const td_coord_t *coord);
    int (*fd)(const td_coord_t *coord);
    uint64_t (*due_ns)(const td_coord_t *coord); /* when tick has something to do */
    void (*tick)(td_coord_t *coord);
} td_coord_ops_t;

struct td_coord {
    const td_coord_ops_t *ops;
    uint64_t term;           /* 0: not ours */
    uint64_t valid_until_ns; /* then nobody may lead by it, until it is renewed */
    char leader[TD_COORD_NAME_CHARS_MAX + 1];
    td_metric_t *is_leader; /* NULL: not declared */
    td_metric_t *term_shown;
};

/** Declares what all backends show. */
void td_coord_declare(td_coord_t *coord, const td_coord_config_t *config);
/** Names a metric; NULL without a registry. */
td_metric_t *td_coord_counter(const td_coord_config_t *config, const char *name, const char *labels,
                              const char *help);
TD_MUST_CHECK td_status_t td_coord_embedded_create(const td_coord_config_t *config,
                                                   td_coord_t **out);
TD_MUST_CHECK td_status_t td_coord_etcd_create(const td_coord_config_t *config, td_coord_t **out);
