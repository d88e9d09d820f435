/* td_coord_options.h - the options of a program that may lead. Threads: init. */
#pragma once

#include "common/base/td_config.h"
#include "common/coord/td_coord.h"

#define TD_COORD_OPTIONS                                                                           \
    {"etcd", TD_OPTION_TEXT, NULL,                                                                 \
     "http://HOST:PORT of etcd, several by comma; without it this process alone leads"},           \
        {"cluster", TD_OPTION_TEXT, "tandem", "name of the cluster in etcd"},                      \
        {"leader-lease-ms",                                                                        \
         TD_OPTION_MS,                                                                             \
         "5000",                                                                                   \
         "a leader that is not heard of for so long is replaced",                                  \
         TD_COORD_LEASE_MS_MIN,                                                                    \
         TD_COORD_LEASE_MS_MAX},                                                                   \
        {"etcd-ca", TD_OPTION_TEXT, NULL,                                                          \
         "https: file with the authorities of etcd's certificate"},                                \
        {"etcd-cert", TD_OPTION_TEXT, NULL, "https: file with our certificate"},                   \
        {"etcd-key", TD_OPTION_TEXT, NULL, "https: file with its key"},                            \
        {"etcd-user", TD_OPTION_TEXT, NULL, "user of etcd's own authentication"},                  \
    {                                                                                              \
        "etcd-password-file", TD_OPTION_TEXT, NULL, "file with that user's password"               \
    }

/** Reads the options and creates what they say.
 * Errors: as td_coord_create(), and TD_ERR_INVALID (the password's file: logged). */
TD_MUST_CHECK td_status_t td_coord_open(const td_config_t *config, const char *election,
                                        const char *id, td_metrics_t *metrics,
                                        const char *name_prefix, td_coord_t **out);
