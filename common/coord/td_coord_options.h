/* td_coord_options.h - the options of programs that speak to etcd. Threads: init. */
#pragma once

#include "common/base/td_config.h"
#include "common/coord/td_coord.h"
#include "common/coord/td_coord_list.h"

#define TD_ETCD_OPTIONS                                                                            \
    {"etcd", TD_OPTION_TEXT, NULL,                                                                 \
     "http://HOST:PORT of etcd, several by comma; without it there is one router, one master"},    \
        {"cluster", TD_OPTION_TEXT, "tandem", "name of the cluster in etcd"},                      \
        {"etcd-ca", TD_OPTION_TEXT, NULL,                                                          \
         "https: file with the authorities of etcd's certificate"},                                \
        {"etcd-cert", TD_OPTION_TEXT, NULL, "https: file with our certificate"},                   \
        {"etcd-key", TD_OPTION_TEXT, NULL, "https: file with its key"},                            \
        {"etcd-user", TD_OPTION_TEXT, NULL, "user of etcd's own authentication"},                  \
    {                                                                                              \
        "etcd-password-file", TD_OPTION_TEXT, NULL, "file with that user's password"               \
    }

/** Of one that may lead. */
#define TD_COORD_OPTIONS                                                                           \
    TD_ETCD_OPTIONS,                                                                               \
    {                                                                                              \
        "leader-lease-ms", TD_OPTION_MS, "5000",                                                   \
            "a leader that is not heard of for so long is replaced", TD_COORD_LEASE_MS_MIN,        \
            TD_COORD_LEASE_MS_MAX                                                                  \
    }

/** Reads the options and creates what they say.
 * Errors: as td_coord_create(), and TD_ERR_INVALID (the password's file: logged). */
TD_MUST_CHECK td_status_t td_coord_open(const td_config_t *config, const char *election,
                                        const char *id, td_metrics_t *metrics,
                                        const char *name_prefix, td_coord_t **out);
/** To hold the key of a name in a folder, with that value, while this process lives: whoever
 * td_coord_campaign()s for it is listed by td_coord_list_open(). Errors: as td_coord_open(). */
TD_MUST_CHECK td_status_t td_coord_open_entry(const td_config_t *config, const char *folder,
                                              const char *name, const char *value,
                                              td_coord_t **out);
/** Errors: as td_coord_list_create(), and TD_ERR_INVALID (the password's file: logged). */
TD_MUST_CHECK td_status_t td_coord_list_open(const td_config_t *config, const char *folder,
                                             td_coord_list_t **out);
