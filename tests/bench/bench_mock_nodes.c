#include "tests/bench/bench_mock_nodes.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_block_key.h"
#include "common/kv/td_kv_layout.h"
#include "common/wire/td_member.h"
#include "tests/bench/bench_words.h"

#define NUMERICS "mock/full" /* no real node has it, so the router never mixes the two */
#define TICK_NS (20 * TD_NS_PER_MS)
#define EVENTS_MAX 256
#define MESSAGES_PER_NODE 256u /* of one turn: then the others come */
#define CHOICES_MAX 16u
#define WORDS_MAX 4096u
#define PREFILL_TOKENS_S 100000u /* what a heartbeat says */
#define EXTRA UINT32_MAX         /* epoll's name of extra_fd */
#define NONE UINT32_MAX

struct node;
struct bench_mock;

typedef enum ticket_state {
    TICKET_FREE = 0,
    TICKET_RESERVED, /* due: when its budget ends */
    TICKET_PREFILL,  /* due: its first tokens */
    TICKET_DECODE    /* due: the next ones */
} ticket_state_t;

typedef struct mock_ticket {
    ticket_state_t state;
    uint64_t id;
    uint32_t attempt;
    uint32_t router;  /* index, whose ticket it is */
    uint32_t decode;  /* index of a node */
    uint32_t prefill; /* likewise; NONE: not started */
    uint64_t text;    /* what its tokens are drawn from: prompt and seed */
    uint32_t prompt_tokens;
    uint32_t max_tokens;
    uint32_t blocks; /* that it holds on its decode node */
    uint32_t n;
    uint32_t given[CHOICES_MAX]; /* max_tokens: has ended */
    uint64_t due_ns;
    uint32_t heap_at;
    uint32_t chain; /* next in its bucket, or free one */
} mock_ticket_t;

typedef struct node {
    struct bench_mock *mock;
    td_bus_t *bus;
    td_member_t *member;
    uint32_t index;
    bool is_prefill;
    uint32_t tickets; /* under way */
    uint32_t tokens;  /* prefill: of their prompts */
    uint32_t blocks;  /* decode: that they hold */
} node_t;

typedef struct word {
    uint32_t id;
    const char *text; /* the tokenizer's */
    uint32_t len;
} word_t;

struct bench_mock {
    bench_mock_config_t config;
    td_member_router_t routers[TD_ROUTERS_MAX];
    uint32_t router_count;
    td_bus_io_t *io;
    node_t *nodes; /* [node_count] */
    uint32_t node_count;
    int epoll_fd;
    int extra_fd; /* that epoll knows */
    bool draining;
    uint64_t next_tick_ns;
    mock_ticket_t *tickets; /* [BENCH_MOCK_TICKETS_MAX] */
    uint32_t *buckets;      /* [BENCH_MOCK_TICKETS_MAX] */
    uint32_t first_free;
    uint32_t *heap; /* [BENCH_MOCK_TICKETS_MAX]: tickets, the one that is due first on top */
    uint32_t heap_count;
    word_t words[WORDS_MAX];
    uint32_t word_count;
    uint32_t out_ids[BENCH_MOCK_MESSAGE_TOKENS_MAX];
    td_str_t out_text;
    bench_mock_counts_t counts;
};

/* --- what is due ------------------------------------------------------------------------------ */

static void heap_place(bench_mock_t *m, uint32_t at, uint32_t ticket)
{
    m->heap[at] = ticket;
    m->tickets[ticket].heap_at = at;
}

static void heap_up(bench_mock_t *m, uint32_t at)
{
    const uint32_t ticket = m->heap[at];

    while (at > 0 && m->tickets[m->heap[(at - 1) / 2]].due_ns > m->tickets[ticket].due_ns) {
        heap_place(m, at, m->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_place(m, at, ticket);
}

static void heap_down(bench_mock_t *m, uint32_t at)
{
    const uint32_t ticket = m->heap[at];

    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= m->heap_count) {
            break;
        }
        if (child + 1 < m->heap_count &&
            m->tickets[m->heap[child + 1]].due_ns < m->tickets[m->heap[child]].due_ns) {
            child++;
        }
        if (m->tickets[m->heap[child]].due_ns >= m->tickets[ticket].due_ns) {
            break;
        }
        heap_place(m, at, m->heap[child]);
        at = child;
    }
    heap_place(m, at, ticket);
}

static void set_due(bench_mock_t *m, mock_ticket_t *t, uint64_t due_ns)
{
    t->due_ns = due_ns;
    heap_up(m, t->heap_at);
    heap_down(m, t->heap_at);
}

/* --- the table of tickets --------------------------------------------------------------------- */

static mock_ticket_t *ticket_find(bench_mock_t *m, uint64_t id)
{
    uint32_t at = m->buckets[id % BENCH_MOCK_TICKETS_MAX];

    while (at != NONE && m->tickets[at].id != id) {
        at = m->tickets[at].chain;
    }
    return at == NONE ? NULL : &m->tickets[at];
}

/* NULL: there is no room. */
static mock_ticket_t *ticket_new(bench_mock_t *m, uint64_t id, uint64_t due_ns)
{
    const uint32_t at = m->first_free;
    uint32_t *bucket = &m->buckets[id % BENCH_MOCK_TICKETS_MAX];

    if (at == NONE) {
        return NULL;
    }
    m->first_free = m->tickets[at].chain;
    m->tickets[at] = (mock_ticket_t){.id = id, .chain = *bucket, .due_ns = due_ns};
    *bucket = at;
    m->heap[m->heap_count] = at;
    heap_up(m, m->heap_count++);
    m->counts.under_way++;
    return &m->tickets[at];
}

static void prefill_done(bench_mock_t *m, mock_ticket_t *t)
{
    if (t->prefill != NONE) {
        m->nodes[t->prefill].tickets--;
        m->nodes[t->prefill].tokens -= t->prompt_tokens;
        t->prefill = NONE;
    }
}

static void ticket_free(bench_mock_t *m, mock_ticket_t *t)
{
    const uint32_t at = (uint32_t)(t - m->tickets);
    const uint32_t hole = t->heap_at;
    uint32_t *link = &m->buckets[t->id % BENCH_MOCK_TICKETS_MAX];

    prefill_done(m, t);
    m->nodes[t->decode].tickets--;
    m->nodes[t->decode].blocks -= t->blocks;
    while (*link != at) {
        link = &m->tickets[*link].chain;
    }
    *link = t->chain;
    if (hole != --m->heap_count) {
        const uint32_t moved = m->heap[m->heap_count];
        heap_place(m, hole, moved);
        heap_up(m, hole);
        heap_down(m, m->tickets[moved].heap_at);
    }
    *t = (mock_ticket_t){.state = TICKET_FREE, .chain = m->first_free};
    m->first_free = at;
    m->counts.under_way--;
}

/* --- what nodes send -------------------------------------------------------------------------- */

/* False: it could not be sent. A real node's request ends there too. */
static bool send(bench_mock_t *m, uint32_t router, uint32_t node, td_msg_t *msg)
{
    if (td_bus_send(m->nodes[node].bus, m->routers[router].id, msg) != TD_OK) {
        m->counts.unsent++;
        return false;
    }
    m->counts.messages_out++;
    return true;
}

static bool send_end(bench_mock_t *m, const mock_ticket_t *t, td_role_t leg)
{
    uint32_t tokens = 0;

    for (uint32_t c = 0; c < t->n; c++) {
        tokens += t->given[c];
    }
    return send(m, t->router, leg == TD_ROLE_PREFILL ? t->prefill : t->decode,
                &(td_msg_t){.type = TD_MSG_END,
                            .u.end = {.ticket = t->id,
                                      .attempt = t->attempt,
                                      .leg = leg,
                                      .status = TD_OK,
                                      .usage = {.prompt_tokens = t->prompt_tokens,
                                                .completion_tokens = tokens,
                                                .computed_tokens = t->prompt_tokens}}});
}

/* The same for the same prompt, seed and choice, whichever node gives it, and from wherever. */
static const word_t *word_of(const bench_mock_t *m, const mock_ticket_t *t, uint32_t choice,
                             uint32_t at)
{
    uint64_t state = t->text ^ ((uint64_t)choice << 32 | at);
    return &m->words[bench_random(&state) % m->word_count];
}

/* A message of a choice's next tokens. */
static bool send_tokens(bench_mock_t *m, mock_ticket_t *t, uint32_t choice)
{
    const uint32_t offset = t->given[choice];
    const uint32_t count = TD_MIN(m->config.message_tokens, t->max_tokens - offset);
    td_msg_t msg = {.type = TD_MSG_TOKENS};

    td_str_clear(&m->out_text);
    for (uint32_t i = 0; i < count; i++) {
        const word_t *word = word_of(m, t, choice, offset + i);
        m->out_ids[i] = word->id;
        if (td_str_append(&m->out_text, word->text, word->len) != TD_OK) {
            return false;
        }
    }
    t->given[choice] += count;
    m->counts.tokens += count;
    msg.u.tokens = (td_msg_tokens_t){.ticket = t->id,
                                     .attempt = t->attempt,
                                     .choice = choice,
                                     .offset = offset,
                                     .count = count,
                                     .tokens = m->out_ids,
                                     .text = {(const uint8_t *)m->out_text.bytes, m->out_text.len},
                                     .finish = t->given[choice] == t->max_tokens ? TD_FINISH_LENGTH
                                                                                 : TD_FINISH_NONE};
    return send(m, t->router, t->decode, &msg);
}

/* A step: a message for each choice that has not ended. False: the ticket has ended. */
static bool give_step(bench_mock_t *m, mock_ticket_t *t)
{
    bool goes_on = false;

    for (uint32_t c = 0; c < t->n; c++) {
        if (t->given[c] < t->max_tokens && !send_tokens(m, t, c)) {
            ticket_free(m, t);
            return false;
        }
        goes_on = goes_on || t->given[c] < t->max_tokens;
    }
    if (goes_on) {
        return true;
    }
    if (send_end(m, t, TD_ROLE_DECODE)) {
        m->counts.ended++;
    }
    ticket_free(m, t);
    return false;
}

/* A ticket's time has come. */
static void ticket_due(bench_mock_t *m, mock_ticket_t *t)
{
    if (t->state == TICKET_RESERVED) {
        m->counts.expired++;
        ticket_free(m, t);
        return;
    }
    if (t->state == TICKET_PREFILL) {
        t->state = TICKET_DECODE;
        if (t->prefill != NONE && !send_end(m, t, TD_ROLE_PREFILL)) {
            ticket_free(m, t);
            return;
        }
        prefill_done(m, t);
    }
    while (give_step(m, t)) {
        if (m->config.tbt_ns > 0) {
            set_due(m, t, t->due_ns + m->config.tbt_ns);
            return;
        }
    }
}

/* --- what nodes are told ---------------------------------------------------------------------- */

static void take_given(bench_mock_t *m, mock_ticket_t *t, const td_msg_work_t *work)
{
    for (uint32_t c = 0; c < work->generated_count; c++) {
        t->given[c] = work->generated[c].ended ? t->max_tokens : work->generated[c].count;
    }
    m->counts.continued += work->generated_count > 0;
}

static void describe(const bench_mock_t *m, mock_ticket_t *t, const td_msg_work_t *work)
{
    uint64_t state = work->seed;

    for (uint32_t i = 0; i < work->prompt_tokens; i++) {
        state ^= work->prompt[i];
        state = bench_random(&state);
    }
    t->text = state;
    t->n = work->n;
    t->prompt_tokens = work->prompt_tokens;
    t->max_tokens = work->max_tokens;
    t->blocks =
        (work->prompt_tokens + work->n * work->max_tokens) / m->config.block_tokens + work->n;
}

static td_status_t reserve(bench_mock_t *m, uint32_t router, node_t *node,
                           const td_msg_work_t *work)
{
    mock_ticket_t *t = ticket_find(m, work->ticket);
    mock_ticket_t wanted = {.state = TICKET_FREE};

    describe(m, &wanted, work);
    if (work->n > CHOICES_MAX || work->prompt_logprobs || work->want_logprobs) {
        m->counts.unsupported++;
        return TD_ERR_UNSUPPORTED;
    }
    if (t !=
        NULL) { /* an earlier attempt of it: its Cancel is on its way to another of our nodes */
        if (t->attempt >= work->attempt) {
            return TD_ERR_STALE;
        }
        m->counts.cancelled++;
        ticket_free(m, t);
    }
    if (m->draining || node->blocks + wanted.blocks > m->config.blocks) {
        t = NULL;
    } else {
        t = ticket_new(m, work->ticket, td_now_ns() + work->budget_ms * TD_NS_PER_MS);
    }
    if (t == NULL) {
        m->counts.busy++;
        return TD_ERR_BUSY;
    }
    describe(m, t, work);
    t->state = TICKET_RESERVED;
    t->attempt = work->attempt;
    t->router = router;
    t->decode = node->index;
    t->prefill = NONE;
    take_given(m, t, work);
    node->tickets++;
    node->blocks += t->blocks;
    return TD_OK;
}

/* What comes first is due after the time to the first token. */
static void begin_prefill(bench_mock_t *m, mock_ticket_t *t)
{
    t->state = TICKET_PREFILL;
    if (m->config.ttft_ns == 0) {
        t->due_ns = td_now_ns();
        ticket_due(m, t);
    } else {
        set_due(m, t, td_now_ns() + m->config.ttft_ns);
    }
}

static void handle_reserve(bench_mock_t *m, uint32_t router, node_t *node,
                           const td_msg_work_t *work)
{
    td_msg_t answer = {.type = TD_MSG_RESERVED,
                       .u.reserved = {.ticket = work->ticket, .attempt = work->attempt}};
    mock_ticket_t *t = NULL;

    m->counts.reserves++;
    answer.u.reserved.status = reserve(m, router, node, work);
    t = answer.u.reserved.status == TD_OK ? ticket_find(m, work->ticket) : NULL;
    if (!send(m, router, node->index, &answer)) {
        if (t != NULL) {
            ticket_free(m, t);
        }
    } else if (t != NULL && work->self_prefill) {
        m->counts.selves++;
        begin_prefill(m, t);
    }
}

static void handle_start(bench_mock_t *m, node_t *node, const td_msg_work_t *work)
{
    mock_ticket_t *t = ticket_find(m, work->ticket);

    if (t == NULL || t->attempt != work->attempt || t->state != TICKET_RESERVED) {
        m->counts.stray++;
        return;
    }
    m->counts.starts++;
    t->prefill = node->index;
    node->tickets++;
    node->tokens += t->prompt_tokens;
    begin_prefill(m, t);
}

/* Both legs are told; the first that hears of it ends both. */
static void handle_cancel(bench_mock_t *m, const td_msg_ticket_t *cancel)
{
    mock_ticket_t *t = ticket_find(m, cancel->ticket);

    if (t != NULL && t->attempt <= cancel->attempt) {
        m->counts.cancelled++;
        ticket_free(m, t);
    }
}

/* NONE: it is none. */
static uint32_t router_of(const bench_mock_t *m, const char *id)
{
    for (uint32_t i = 0; i < m->router_count; i++) {
        if (strcmp(m->routers[i].id, id) == 0) {
            return i;
        }
    }
    return NONE;
}

static void handle(bench_mock_t *m, node_t *node, const td_msg_t *msg)
{
    const uint32_t router = router_of(m, msg->sender_id);

    m->counts.messages_in++;
    if (router == NONE) {
        m->counts.stray++;
    } else if (msg->type == TD_MSG_PEERS) {
        m->counts.peers_messages++; /* not for the member: it would connect to all of them */
        m->counts.peers_entries += msg->u.peers.count;
    } else if (td_member_handle(node->member, msg)) {
        return;
    } else if (msg->type == TD_MSG_RESERVE && !node->is_prefill) {
        handle_reserve(m, router, node, &msg->u.work);
    } else if (msg->type == TD_MSG_START && node->is_prefill) {
        handle_start(m, node, &msg->u.work);
    } else if (msg->type == TD_MSG_CANCEL) {
        handle_cancel(m, &msg->u.ticket);
    } else {
        m->counts.stray++;
    }
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    node_t *node = ctx;
    bench_mock_t *m = node->mock;
    const uint32_t whose = router == NULL ? NONE : router_of(m, router);
    (void)incarnation;

    m->counts.lives += router == NULL;
    for (uint32_t i = 0; i < BENCH_MOCK_TICKETS_MAX && node->tickets > 0; i++) {
        mock_ticket_t *t = &m->tickets[i];
        if (t->state != TICKET_FREE && (router == NULL || t->router == whose) &&
            (t->decode == node->index || t->prefill == node->index)) {
            m->counts.expired++;
            ticket_free(m, t);
        }
    }
}

/* --- start and end ---------------------------------------------------------------------------- */

/* Tokens that give text by themselves, whatever stands around them. */
static td_status_t find_words(bench_mock_t *m)
{
    const td_tokenizer_t *tok = m->config.tokenizer;

    for (uint32_t id = 0; id < td_tokenizer_vocab_size(tok) && m->word_count < WORDS_MAX; id++) {
        const char *text = NULL;
        size_t len = 0;
        bool is_word = !td_tokenizer_is_special(tok, id) && !td_tokenizer_is_stop(tok, id) &&
                       td_tokenizer_bytes(tok, id, &text, &len) && len > 2 && text[0] == ' ';
        for (size_t i = 1; i < len && is_word; i++) {
            is_word = text[i] >= 'a' && text[i] <= 'z';
        }
        if (is_word) {
            m->words[m->word_count++] = (word_t){id, text, (uint32_t)len};
        }
    }
    if (m->word_count == 0) {
        TD_LOG_ERROR("no words", "expected=\"tokens of a space and letters in the vocabulary\"");
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

static td_status_t open_node(bench_mock_t *m, node_t *node, const td_msg_register_t *self)
{
    const bench_mock_config_t *c = &m->config;
    const td_member_events_t events = {.ctx = node, .fenced = on_fenced};
    td_msg_register_t own = *self;
    char id[TD_MSG_ID_CHARS_MAX + 1];
    const td_bus_config_t bus = {.bind = "tcp://127.0.0.1:*",
                                 .id = id,
                                 .incarnation = td_random_u64() | 1,
                                 .secret = c->secret,
                                 .io = m->io};
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = node->index}};

    (void)snprintf(id, sizeof(id), "%s-%c%u", c->name, node->is_prefill ? 'p' : 'd',
                   node->is_prefill ? node->index + 1 : node->index - c->prefills + 1);
    TD_TRY(td_bus_create(&bus, &node->bus));
    own.self = (td_msg_peer_t){.id = td_bus_id(node->bus),
                               .role = node->is_prefill ? TD_ROLE_PREFILL : TD_ROLE_DECODE,
                               .endpoint = td_bus_endpoint(node->bus)};
    TD_TRY(td_member_create(node->bus, c->router, &own, &events, &node->member));
    if (epoll_ctl(m->epoll_fd, EPOLL_CTL_ADD, td_bus_fd(node->bus), &event) != 0) {
        TD_LOG_ERROR("bus not watched", "err=\"%m\"");
        return TD_ERR_IO;
    }
    return TD_OK;
}

static td_status_t open_nodes(bench_mock_t *m)
{
    const bench_mock_config_t *c = &m->config;
    const td_block_root_fields_t fields = {.fingerprint = c->fingerprint,
                                           .numerics_class = NUMERICS,
                                           .layout_version = TD_KV_LAYOUT_VERSION,
                                           .codec = c->kv_codec,
                                           .block_tokens = c->block_tokens,
                                           .adapter = "",
                                           .salt = ""};
    td_block_root_t root;
    td_block_key_t probe;
    td_msg_register_t self = {.http = "",
                              .numerics_class = NUMERICS,
                              .kv_codec = c->kv_codec,
                              .fingerprint = {c->fingerprint, 32},
                              .context_max = c->context_max,
                              .version = TD_VERSION};

    td_block_root_make(c->secret, &fields, &root);
    td_block_probe_key(&root, c->block_tokens, &probe);
    self.probe_key = (td_bytes_t){probe.bytes, sizeof(probe.bytes)};
    for (uint32_t i = 0; i < c->prefills + c->decodes; i++) {
        node_t *node = &m->nodes[m->node_count++];
        *node = (node_t){.mock = m, .index = i, .is_prefill = i < c->prefills};
        TD_TRY(open_node(m, node, &self));
    }
    return TD_OK;
}

static td_status_t open_tables(bench_mock_t *m)
{
    m->nodes = td_calloc(m->config.prefills + m->config.decodes, sizeof(*m->nodes));
    m->tickets = td_calloc(BENCH_MOCK_TICKETS_MAX, sizeof(*m->tickets));
    m->buckets = td_calloc(BENCH_MOCK_TICKETS_MAX, sizeof(*m->buckets));
    m->heap = td_calloc(BENCH_MOCK_TICKETS_MAX, sizeof(*m->heap));
    if (m->nodes == NULL || m->tickets == NULL || m->buckets == NULL || m->heap == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < BENCH_MOCK_TICKETS_MAX; i++) {
        m->buckets[i] = NONE;
        m->tickets[i].chain = i + 1 < BENCH_MOCK_TICKETS_MAX ? i + 1 : NONE;
    }
    m->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return m->epoll_fd >= 0 ? TD_OK : TD_ERR_IO;
}

td_status_t bench_mock_create(const bench_mock_config_t *config, bench_mock_t **out)
{
    bench_mock_t *m = td_calloc(1, sizeof(*m));
    td_status_t status = TD_ERR_NO_MEMORY;

    TD_ASSERT(config->prefills + config->decodes <= BENCH_MOCK_NODES_MAX &&
              config->message_tokens <= TD_ARRAY_LEN(m->out_ids));
    if (m == NULL) {
        return status;
    }
    m->config = *config;
    m->epoll_fd = -1;
    m->extra_fd = -1;
    status = td_member_routers_parse(config->router, m->routers, &m->router_count);
    if (status == TD_OK) {
        status = open_tables(m);
    }
    if (status == TD_OK) {
        status = find_words(m);
    }
    if (status == TD_OK) { /* of each node one to hear, and one to each router */
        status =
            td_bus_io_create(config->io_threads,
                             (1 + m->router_count) * (config->prefills + config->decodes), &m->io);
    }
    if (status == TD_OK) {
        status = open_nodes(m);
    }
    if (status != TD_OK) {
        bench_mock_destroy(m);
        return status;
    }
    *out = m;
    return TD_OK;
}

void bench_mock_destroy(bench_mock_t *m)
{
    if (m == NULL) {
        return;
    }
    for (uint32_t i = 0; i < m->node_count; i++) {
        td_member_destroy(m->nodes[i].member);
        td_bus_destroy(m->nodes[i].bus);
    }
    td_bus_io_destroy(m->io);
    if (m->epoll_fd >= 0) {
        (void)close(m->epoll_fd);
    }
    td_free(m->nodes);
    td_free(m->tickets);
    td_free(m->buckets);
    td_free(m->heap);
    td_str_fini(&m->out_text);
    td_free(m);
}

/* --- turns ------------------------------------------------------------------------------------ */

static void drain_messages(bench_mock_t *m, node_t *node)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < MESSAGES_PER_NODE; i++) {
        if (td_bus_recv(node->bus, &msg, &arena) != TD_OK) {
            return;
        }
        handle(m, node, &msg);
        td_msg_arena_free(arena);
    }
}

static void tick(bench_mock_t *m)
{
    const bench_mock_config_t *c = &m->config;

    m->counts.registered = 0;
    for (uint32_t i = 0; i < m->node_count; i++) {
        node_t *node = &m->nodes[i];
        const td_msg_heartbeat_t load = {.queued_requests = node->is_prefill ? node->tickets : 0,
                                         .queued_tokens =
                                             node->is_prefill ? node->tokens : node->tickets,
                                         .free_blocks = c->blocks - node->blocks,
                                         .total_blocks = c->blocks,
                                         .tokens_per_s = node->is_prefill ? PREFILL_TOKENS_S : 0,
                                         .draining = m->draining};
        /* The descriptor says that something came, not that something is left. */
        drain_messages(m, node);
        td_member_tick(node->member, &load);
        td_bus_flush(node->bus);
        m->counts.registered += td_member_registered(node->member) == m->router_count;
    }
}

static int wait_ms(const bench_mock_t *m, uint64_t now_ns)
{
    uint64_t until_ns = m->next_tick_ns;

    if (m->heap_count > 0) {
        until_ns = TD_MIN(until_ns, m->tickets[m->heap[0]].due_ns);
    }
    return until_ns <= now_ns ? 0 : (int)((until_ns - now_ns + TD_NS_PER_MS - 1) / TD_NS_PER_MS);
}

static void watch_extra(bench_mock_t *m, int extra_fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = EXTRA}};

    if (extra_fd != m->extra_fd && epoll_ctl(m->epoll_fd, EPOLL_CTL_ADD, extra_fd, &event) == 0) {
        m->extra_fd = extra_fd;
    }
}

bool bench_mock_turn(bench_mock_t *m, int extra_fd)
{
    struct epoll_event events[EVENTS_MAX];
    uint64_t now = td_now_ns();
    bool extra = false;
    int count = 0;

    watch_extra(m, extra_fd);
    count = epoll_wait(m->epoll_fd, events, EVENTS_MAX, wait_ms(m, now));
    for (int i = 0; i < count; i++) {
        if (events[i].data.u32 == EXTRA) {
            extra = true;
        } else {
            drain_messages(m, &m->nodes[events[i].data.u32]);
        }
    }
    now = td_now_ns();
    while (m->heap_count > 0 && m->tickets[m->heap[0]].due_ns <= now) {
        ticket_due(m, &m->tickets[m->heap[0]]);
    }
    if (now >= m->next_tick_ns) {
        m->next_tick_ns = now + TICK_NS;
        tick(m);
    }
    return extra;
}

void bench_mock_drain(bench_mock_t *m)
{
    m->draining = true;
    m->next_tick_ns = 0;
}

bench_mock_counts_t bench_mock_counts(const bench_mock_t *m)
{
    return m->counts;
}
