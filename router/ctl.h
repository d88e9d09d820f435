/* ctl.h - tandemctl's parts: what it asks (ctl_main.c) and how answers are shown (ctl_wire.c). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum ctl_command {
    CTL_STATUS,
    CTL_NODES,
    CTL_DRAIN,
    CTL_UNDRAIN,
    CTL_PIN,
    CTL_UNPIN,
    CTL_EVICT,
    CTL_SPECULATION,
    CTL_POLICY,
    CTL_SLO,
    CTL_TENANTS,
    CTL_CALIBRATION,
    CTL_TRACE,
    CTL_EVENTS,
    CTL_KEYGEN,
    CTL_APIKEY,
    CTL_COMMANDS
} ctl_command_t;

#define CTL_KEY_BYTES 16u

/** What a command line says. Everything is borrowed. */
typedef struct ctl_request {
    ctl_command_t command;
    const char *node;   /* or the policy, or the request; NULL: any */
    bool soft;          /* pin for half an hour */
    const char *prompt; /* NULL: keys are given */
    const char *salt;   /* NULL: none */
    const char *tenant; /* NULL: none */
    const uint8_t *keys;
    size_t key_count;
    bool set_explore;
    uint32_t explore_percent;
    bool set_ttft;
    uint32_t ttft_ms;
    bool set_tbt;
    uint32_t tbt_ms;
    uint64_t since;
    uint32_t lease_ms;
} ctl_request_t;

/** The bytes of a Request; the caller frees them. NULL: out of memory. */
uint8_t *ctl_encode(const ctl_request_t *request, uint64_t id, size_t *len_out);

typedef struct ctl_shown {
    int exit_code;   /* 0; 1: the router refused, or what came is no Reply */
    uint64_t newest; /* number of the last event that was shown; 0: none */
} ctl_shown_t;

/** Prints a Reply to out: tables for people, or one line of JSON; refusals to err. */
ctl_shown_t ctl_show(const uint8_t *bytes, size_t len, bool json, FILE *out, FILE *err);
