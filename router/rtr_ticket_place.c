#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "router/rtr_tickets_internal.h"

#define STALE_MS 1600u /* three heartbeats missed: the node counts as saturated */

void rtr_tickets_root(const rtr_tickets_t *ts, const void *salt, size_t salt_len,
                      td_block_root_t *out)
{
    const td_block_root_fields_t fields = {.fingerprint = ts->config.fingerprint,
                                           .numerics_class =
                                               rtr_registry_numerics(ts->config.registry),
                                           .layout_version = TD_KV_LAYOUT_VERSION,
                                           .codec = ts->config.kv_codec,
                                           .block_tokens = ts->config.block_tokens,
                                           .adapter = "",
                                           .salt = salt_len > 0 ? salt : "",
                                           .salt_len = salt_len};

    td_block_root_make(ts->config.secret, &fields, out);
}

/* Most prompts have no salt: their root is made once for a class. */
static void root_of(rtr_tickets_t *ts, const td_str_t *salt, td_block_root_t *out)
{
    const char *numerics = rtr_registry_numerics(ts->config.registry);

    if (salt->len > 0) {
        rtr_tickets_root(ts, salt->bytes, salt->len, out);
        return;
    }
    if (numerics[0] == '\0' || strcmp(ts->root_numerics, numerics) != 0) {
        rtr_tickets_root(ts, NULL, 0, &ts->root);
        (void)snprintf(ts->root_numerics, sizeof(ts->root_numerics), "%s", numerics);
    }
    *out = ts->root;
}

void rtr_ticket_hash(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    const rtr_prompt_t *prompt = rtr_ticket_prompt(t);
    const td_str_t *salt = &t->req->params.cache_salt;
    uint32_t count = TD_MIN(prompt->count / ts->config.block_tokens, RTR_HINT_BLOCKS_MAX);
    td_block_root_t root;

    if (t->keys != NULL || count == 0) {
        return;
    }
    t->keys = td_calloc(count, sizeof(*t->keys));
    if (t->keys == NULL) {
        return; /* only the index misses it */
    }
    root_of(ts, salt, &root);
    td_block_keys(&root, prompt->tokens, (size_t)count * ts->config.block_tokens,
                  ts->config.block_tokens, t->keys);
    t->key_count = count;
}

/* The node a client named. It binds the first try only: when that has failed, others may serve. */
const char *rtr_ticket_pinned(const rtr_ticket_t *t, td_role_t role)
{
    if (t->retries > 0) {
        return "";
    }
    return role == TD_ROLE_PREFILL ? t->req->params.place_prefill : t->req->params.place_decode;
}

bool rtr_ticket_may_use(const rtr_ticket_t *t, const rtr_node_t *node, uint32_t slot,
                        td_role_t role, bool also_avoided, uint64_t now)
{
    const char *pinned = rtr_ticket_pinned(t, role);

    if (!node->live || rtr_node_drains(node) || node->role != role ||
        rtr_slot_has(&t->tried, slot)) {
        return false;
    }
    if (pinned[0] != '\0') {
        return strcmp(pinned, node->id) == 0;
    }
    return also_avoided ||
           (!rtr_slot_has(&t->avoid, slot) && !rtr_breaker_is_open(&node->breaker, now) &&
            now - node->seen_ns < STALE_MS * TD_NS_PER_MS);
}

bool rtr_ticket_any(const rtr_tickets_t *ts, const rtr_ticket_t *t, td_role_t role,
                    bool also_avoided, uint64_t now)
{
    uint32_t count = 0;
    const uint32_t *slots = rtr_registry_of_role(ts->config.registry, role, &count);

    for (uint32_t i = 0; i < count; i++) {
        const rtr_node_t *node = rtr_registry_node(ts->config.registry, slots[i]);
        if (rtr_ticket_may_use(t, node, slots[i], role, also_avoided, now)) {
            return true;
        }
    }
    return false;
}

/* What a node could pull: what the store says it has. While that is not known, what anybody has:
 * the nodes put it there. */
static uint32_t match_of_store(rtr_tickets_t *ts, uint32_t best)
{
    const rtr_node_t *master = rtr_registry_store_master(ts->config.registry);
    rtr_index_slot_t is;
    uint32_t slot = 0;

    if (rtr_registry_live(ts->config.registry, TD_ROLE_KVSTORE) == 0) {
        return 0;
    }
    if (master == NULL) {
        return best;
    }
    slot = rtr_registry_slot(ts->config.registry, master);
    rtr_index_look(ts->config.index, slot, td_now_ns(), &is);
    return is.state == RTR_INDEX_EXACT ? ts->match[slot] : best;
}

void rtr_ticket_match(rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    const uint32_t best = rtr_index_match(ts->config.index, t->keys, t->key_count, ts->match);

    ts->match_pool = match_of_store(ts, best);
}

rtr_place_ask_t rtr_ticket_ask(const rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    return (rtr_place_ask_t){
        .policy = ts->config.policy,
        .now_ns = td_now_ns(),
        .turn = ts->turn,
        .draw = t->id, /* drawn at random, and once */
        .prompt_tokens = rtr_ticket_prompt(t)->count,
        .granule_tokens = ts->config.block_tokens,
        .pool_tokens = ts->match_pool * ts->config.block_tokens,
        .keep_local = RTR_KEEP_LOCAL_DEFAULT,
        .typical = &ts->prefill_time,
        .sequences = t->req->params.n,
        .need_blocks = (uint32_t)TD_MIN(t->need_blocks, UINT32_MAX),
        .typical_tbt = &ts->tbt,
        .self_tokens_max = ts->config.self_tokens_max,
        .typical_self = &ts->self,
    };
}

/* Views are those of the role's live nodes, in the registry's order. RTR_PLACE_NONE: none. */
static uint32_t slot_of(const uint32_t *slots, uint32_t view)
{
    return view == RTR_PLACE_NONE ? RTR_PLACE_NONE : slots[view];
}

/* O(count): of a slot that was chosen, not of each. */
static uint32_t view_of(const uint32_t *slots, uint32_t count, uint32_t slot)
{
    for (uint32_t i = 0; i < count; i++) {
        if (slots[i] == slot) {
            return i;
        }
    }
    return RTR_PLACE_NONE;
}

rtr_prefill_choice_t rtr_ticket_choose_prefill(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                               const rtr_place_ask_t *ask, bool also_avoided)
{
    uint32_t count = 0;
    const uint32_t *slots = rtr_registry_of_role(ts->config.registry, TD_ROLE_PREFILL, &count);
    rtr_prefill_choice_t choice = {0};

    for (uint32_t i = 0; i < count; i++) {
        const rtr_node_t *node = rtr_registry_node(ts->config.registry, slots[i]);
        ts->prefills[i] = (rtr_prefill_view_t){
            .allowed =
                rtr_ticket_may_use(t, node, slots[i], TD_ROLE_PREFILL, also_avoided, ask->now_ns),
            .match_tokens = ts->match[slots[i]] * ts->config.block_tokens,
            .lately = rtr_backlog_lately(&node->backlog, ask->now_ns),
            .backlog = &node->backlog,
            .others = &node->others,
            .estimate = &node->prefill_time,
        };
    }
    choice = rtr_place_prefill(ask, ts->prefills, count);
    choice.node = slot_of(slots, choice.node);
    return choice;
}

rtr_decode_choice_t rtr_ticket_choose_decode(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                             const rtr_place_ask_t *ask, bool also_avoided)
{
    uint32_t count = 0;
    const uint32_t *slots = rtr_registry_of_role(ts->config.registry, TD_ROLE_DECODE, &count);
    rtr_decode_choice_t choice = {0};

    for (uint32_t i = 0; i < count; i++) {
        const rtr_node_t *node = rtr_registry_node(ts->config.registry, slots[i]);
        ts->decodes[i] = (rtr_decode_view_t){
            .allowed =
                rtr_ticket_may_use(t, node, slots[i], TD_ROLE_DECODE, also_avoided, ask->now_ns),
            .running = node->sequences + node->beat.other_requests,
            .promised = node->promised_blocks + node->beat.other_blocks,
            .free_blocks = node->beat.free_blocks,
            .total_blocks = node->beat.total_blocks,
            .match_blocks = ts->match[slots[i]],
            .tbt = &node->tbt,
            .self = &node->self,
        };
    }
    choice = rtr_place_decode(ask, ts->decodes, count);
    choice.node = slot_of(slots, choice.node);
    return choice;
}

uint32_t rtr_ticket_find_named(const rtr_tickets_t *ts, const char *named, td_role_t role)
{
    const uint32_t slot =
        named[0] == '\0' ? RTR_PLACE_NONE : rtr_registry_find_live(ts->config.registry, named);

    return slot != RTR_PLACE_NONE && rtr_registry_node(ts->config.registry, slot)->role == role
               ? slot
               : RTR_PLACE_NONE;
}

uint32_t rtr_ticket_named_self(const rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    const char *named = rtr_ticket_pinned(t, TD_ROLE_PREFILL);
    const char *decode = rtr_ticket_pinned(t, TD_ROLE_DECODE);

    if (rtr_ticket_holds_for_echo(t) || (decode[0] != '\0' && strcmp(decode, named) != 0)) {
        return RTR_PLACE_NONE;
    }
    return rtr_ticket_find_named(ts, named, TD_ROLE_DECODE);
}

/* Where a client has named a node, that one; not where it needs what only prefill nodes give. */
rtr_self_choice_t rtr_ticket_choose_self(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                         const rtr_place_ask_t *ask,
                                         const rtr_prefill_choice_t *prefill,
                                         const rtr_decode_choice_t *decode)
{
    const uint32_t named = rtr_ticket_named_self(ts, t);
    uint32_t count = 0;
    const uint32_t *slots = rtr_registry_of_role(ts->config.registry, TD_ROLE_DECODE, &count);
    const uint32_t view = named == RTR_PLACE_NONE ? named : view_of(slots, count, named);
    rtr_self_choice_t choice = {.node = RTR_PLACE_NONE};

    if (view != RTR_PLACE_NONE && ts->decodes[view].allowed) {
        return (rtr_self_choice_t){
            .node = named, .work = rtr_self_work(ask, &ts->decodes[view]), .ttft_ns = -1};
    }
    if (rtr_ticket_pinned(t, TD_ROLE_PREFILL)[0] != '\0' || rtr_ticket_holds_for_echo(t) ||
        prefill->node == RTR_PLACE_NONE || decode->node == RTR_PLACE_NONE) {
        return choice;
    }
    choice = rtr_place_self(ask, ts->decodes, count, prefill, decode);
    choice.node = slot_of(slots, choice.node);
    return choice;
}

static void hold_decode(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t decode, uint64_t now)
{
    rtr_node_t *d = rtr_registry_node(ts->config.registry, decode);

    t->decode = (rtr_leg_t){.slot = decode, .incarnation = d->incarnation, .held = true};
    d->sequences += t->req->params.n;
    d->promised_blocks += t->need_blocks;
    rtr_breaker_placed(&d->breaker, now);
}

void rtr_attempt_hold(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_prefill_choice_t *prefill,
                      uint32_t decode, uint64_t now)
{
    rtr_node_t *p = rtr_registry_node(ts->config.registry, prefill->node);

    t->work = prefill->work;
    t->self = false;
    t->prefill = (rtr_leg_t){.slot = prefill->node, .incarnation = p->incarnation, .held = true};
    rtr_backlog_add(&p->backlog, &t->work, now);
    rtr_breaker_placed(&p->breaker, now);
    hold_decode(ts, t, decode, now);
}

void rtr_attempt_hold_self(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_self_choice_t *self,
                           uint64_t now)
{
    t->work = self->work;
    t->self = true;
    hold_decode(ts, t, self->node, now);
}

/* For the decode node that was found: others offer other drafters, at other costs. */
void rtr_ticket_choose_draft(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    const rtr_params_t *p = &t->req->params;
    const rtr_node_t *node = rtr_registry_node(ts->config.registry, t->decode.slot);
    const rtr_draft_ask_t ask = {.ticket = t->id,
                                 .tenant = t->tenant,
                                 .prompt_class = t->prompt_class,
                                 .is_auto = p->drafter_auto,
                                 .drafter = p->drafter,
                                 .has_k = p->has_k,
                                 .k_min = p->k_min,
                                 .k_max = p->k_max};

    t->draft = rtr_drafters_choose(ts->config.drafters, &ask, node->drafters, &node->beat);
}

/* Of the views up to so many that are allowed, the chosen one first, if any. first: of the first
 * view. Answers how many; *allowed_out: of how many. */
static uint32_t list_allowed(const bool *first, size_t stride, uint32_t count, uint32_t chosen,
                             uint32_t nodes[RTR_TRACE_CANDIDATES_MAX], uint32_t *allowed_out)
{
    uint32_t listed = chosen != RTR_PLACE_NONE ? 1 : 0;

    nodes[0] = chosen;
    *allowed_out = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bool allowed = *(const bool *)((const uint8_t *)first + i * stride);
        *allowed_out += allowed;
        if (allowed && i != chosen && listed < RTR_TRACE_CANDIDATES_MAX) {
            nodes[listed++] = i;
        }
    }
    return listed;
}

static void trace_nodes(const rtr_tickets_t *ts, const rtr_place_ask_t *ask, const rtr_ticket_t *t,
                        rtr_trace_decision_t *d)
{
    uint32_t count = 0;
    const uint32_t *slots = rtr_registry_of_role(ts->config.registry, TD_ROLE_PREFILL, &count);
    rtr_prefill_explained_t why[RTR_TRACE_CANDIDATES_MAX];
    uint32_t nodes[RTR_TRACE_CANDIDATES_MAX];

    d->prefill_count =
        list_allowed(&ts->prefills[0].allowed, sizeof(ts->prefills[0]), count,
                     view_of(slots, count, t->prefill.slot), nodes, &d->prefill_nodes);
    rtr_explain_prefill(ask, ts->prefills, count, nodes, d->prefill_count, why);
    for (uint32_t i = 0; i < d->prefill_count; i++) {
        (void)snprintf(d->prefills[i].node, sizeof(d->prefills[i].node), "%s",
                       rtr_registry_node(ts->config.registry, slots[nodes[i]])->id);
        d->prefills[i].why = why[i];
    }
    slots = rtr_registry_of_role(ts->config.registry, TD_ROLE_DECODE, &count);
    d->decode_count = list_allowed(&ts->decodes[0].allowed, sizeof(ts->decodes[0]), count,
                                   view_of(slots, count, t->decode.slot), nodes, &d->decode_nodes);
    for (uint32_t i = 0; i < d->decode_count; i++) {
        const rtr_decode_view_t *v = &ts->decodes[nodes[i]];
        (void)snprintf(d->decodes[i].node, sizeof(d->decodes[i].node), "%s",
                       rtr_registry_node(ts->config.registry, slots[nodes[i]])->id);
        d->decodes[i].running = v->running;
        d->decodes[i].free_blocks = v->free_blocks;
        d->decodes[i].why = rtr_explain_decode(ask, v);
    }
}

/* As the views stand that the choice was made from. */
void rtr_attempt_note_decision(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_place_ask_t *ask)
{
    rtr_trace_decision_t *d = NULL;

    if (ts->config.trace == NULL) {
        return;
    }
    d = rtr_trace_open(ts->config.trace);
    t->decision = d->number;
    t->given_before = rtr_ticket_received(t);
    (void)snprintf(d->request, sizeof(d->request), "%s", t->req->request_id);
    d->prompt = t->prompt_idx;
    d->attempt = t->attempt;
    d->prompt_tokens = rtr_ticket_prompt(t)->count;
    d->self_prefill = t->self;
    d->generated_tokens = t->given_before;
    d->policy = ask->policy;
    d->draft = t->draft;
    d->prompt_class = t->prompt_class;
    trace_nodes(ts, ask, t, d);
}
