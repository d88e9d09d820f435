/* bench_mock_nodes.h - prefill and decode nodes that compute nothing: they join a real router,
 * speak the real protocol over a bus each, and answer with tokens drawn from the prompt. One loop
 * plays all of them. What a hand-off moves stays inside this process, so no two nodes speak with
 * each other, and the lists of peers are only counted. Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/model/td_tokenizer.h"
#include "common/wire/td_bus.h"

#define BENCH_MOCK_NODES_MAX 4096u
#define BENCH_MOCK_MESSAGE_TOKENS_MAX 1024u
#define BENCH_MOCK_TICKETS_MAX 65536u /* under way on all nodes; past it a reserve gets BUSY */

typedef struct bench_mock_config {
    const char *router; /* as td_member_routers_parse() reads it */
    const char *name;   /* nodes are NAME-p1..., NAME-d1... */
    const uint8_t *secret;
    const uint8_t *fingerprint; /* [32], of the model */
    const char *kv_codec;
    const td_tokenizer_t *tokenizer;
    uint32_t prefills;
    uint32_t decodes;
    uint32_t block_tokens;
    uint32_t blocks; /* of each node's pool, as it says */
    uint32_t context_max;
    uint32_t io_threads;
    uint32_t message_tokens; /* of one message to the router */
    uint64_t ttft_ns;        /* from START to the first token */
    uint64_t tbt_ns;         /* between two messages of a choice */
} bench_mock_config_t;

typedef struct bench_mock_counts {
    uint32_t registered; /* nodes that all routers know, now */
    uint32_t under_way;  /* tickets, now */
    uint64_t reserves;
    uint64_t busy; /* of them, those that were refused */
    uint64_t unsupported;
    uint64_t starts;
    uint64_t selves; /* prompts that the decode node was to compute itself: without a START */
    uint64_t ended;
    uint64_t cancelled;
    uint64_t expired; /* never started, or their nodes were fenced */
    uint64_t continued;
    uint64_t tokens;
    uint64_t messages_in;
    uint64_t messages_out;
    uint64_t unsent; /* their tickets end with them */
    uint64_t stray;  /* of tickets that are not, or no more, known */
    uint64_t peers_messages;
    uint64_t peers_entries;
    uint64_t lives; /* begun after the router had declared the one before dead */
} bench_mock_counts_t;

typedef struct bench_mock bench_mock_t;

/** Opens the buses; the nodes register by and by, in bench_mock_turn().
 * Errors: as td_bus_create() and td_member_create(), TD_ERR_INVALID (no token of the vocabulary is
 * a word); what went wrong is logged. Owner: the caller ends it with bench_mock_destroy(); the
 * config's pointers are borrowed until then.
 */
TD_MUST_CHECK td_status_t bench_mock_create(const bench_mock_config_t *config, bench_mock_t **out);
void bench_mock_destroy(bench_mock_t *mock);
/** Waits for messages, what is due, or extra_fd; handles them. True: extra_fd is readable. */
bool bench_mock_turn(bench_mock_t *mock, int extra_fd);
/** The nodes take nothing new, and tell the router. */
void bench_mock_drain(bench_mock_t *mock);
bench_mock_counts_t bench_mock_counts(const bench_mock_t *mock);
