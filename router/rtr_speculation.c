/* Speculation as a request asks for it: the drafter and the bounds of k, as far as it says. What it
 * leaves open is chosen when its node is known (rtr_drafters); the decode node chooses k inside the
 * bounds step by step. No choice changes a token of the answer (I1), unless the request asks for
 * the rejection rule: then none changes its distribution. */
#include <string.h>

#include "common/base/td_base.h"
#include "common/spec/td_draft.h"
#include "router/rtr_api_internal.h"

_Static_assert(TD_MSG_DRAFTS_MAX == TD_DRAFT_TOKENS_MAX, "both bound a step's drafts");

static td_status_t read_drafter(const rtr_parse_t *ps, const json_t *value)
{
    const char *name = json_string_value(value);

    if (name == NULL) {
        return rtr_refuse(ps, "speculation", "speculation.drafter must be a string, got %s",
                          rtr_json_type(value));
    }
    ps->p->drafter_auto = strcmp(name, "auto") == 0;
    if (ps->p->drafter_auto) {
        ps->p->drafter = TD_DRAFTER_MEMO;
    } else if (td_drafter_parse(name, &ps->p->drafter) != TD_OK) {
        return rtr_refuse(ps, "speculation", "speculation.drafter must be auto, %s, got \"%.32s\"",
                          TD_DRAFTER_NAMES, name);
    }
    return TD_OK;
}

static td_status_t read_rule(const rtr_parse_t *ps, const json_t *value)
{
    const char *name = json_string_value(value);

    if (name == NULL) {
        return rtr_refuse(ps, "speculation", "speculation.rule must be a string, got %s",
                          rtr_json_type(value));
    }
    if (td_draft_rule_parse(name, &ps->p->draft_rule) != TD_OK) {
        return rtr_refuse(ps, "speculation", "speculation.rule must be %s, got \"%.32s\"",
                          TD_DRAFT_RULE_NAMES, name);
    }
    return TD_OK;
}

/* {"drafter": "auto" or a name, "k": drafts a step, "rule": how they are verified}: k given is k
 * kept, within the server's limit. */
static td_status_t read_wish(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "speculation");
    rtr_params_t *p = ps->p;
    rtr_parse_t inner = *ps;
    const json_t *drafter = NULL;
    const json_t *rule = NULL;
    int64_t k = 0;
    bool has_k = false;

    if (value == NULL) {
        return TD_OK;
    }
    if (!json_is_object(value)) {
        return rtr_refuse_type(ps, "speculation", "an object", value);
    }
    inner.root = value;
    drafter = rtr_field(&inner, "drafter");
    if (drafter != NULL) {
        TD_TRY(read_drafter(ps, drafter));
    }
    rule = rtr_field(&inner, "rule");
    if (rule != NULL) {
        TD_TRY(read_rule(ps, rule));
    }
    TD_TRY(rtr_field_int(&inner, "k", 0, TD_DRAFT_TOKENS_MAX, &k, &has_k));
    p->has_k = has_k;
    if (has_k) {
        p->k_max = TD_MIN((uint32_t)k, ps->model->draft_max);
        p->k_min = p->k_max;
    }
    return TD_OK;
}

/* OpenAI's predicted outputs: {"type": "content", "content": a string or an array of text parts}.
 */
static td_status_t read_prediction(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "prediction");
    const char *type = json_string_value(json_object_get(value, "type"));
    const json_t *content = json_object_get(value, "content");
    td_str_t text = {0};
    td_status_t status = TD_OK;
    size_t i = 0;
    json_t *part = NULL;

    if (value == NULL) {
        return TD_OK;
    }
    if (type == NULL || strcmp(type, "content") != 0 ||
        !(json_is_string(content) || json_is_array(content))) {
        return rtr_refuse(ps, "prediction",
                          "prediction must be {\"type\": \"content\", \"content\": a string or an "
                          "array of text parts}");
    }
    if (json_is_string(content)) {
        status = td_str_append(&text, json_string_value(content), json_string_length(content));
    }
    json_array_foreach(content, i, part)
    {
        const char *kind = json_string_value(json_object_get(part, "type"));
        const json_t *piece = json_object_get(part, "text");
        if (kind == NULL || strcmp(kind, "text") != 0 || !json_is_string(piece)) {
            td_str_fini(&text);
            return rtr_refuse(ps, "prediction",
                              "prediction.content[%zu] must be {\"type\": \"text\", \"text\": a "
                              "string}",
                              i);
        }
        if (status == TD_OK) {
            status = td_str_append(&text, json_string_value(piece), json_string_length(piece));
        }
    }
    if (status == TD_OK && text.len > 0) {
        status = rtr_encode_text(ps, "prediction", text.bytes, text.len, &ps->p->prediction,
                                 &ps->p->prediction_tokens);
    }
    td_str_fini(&text);
    if (status == TD_ERR_NO_MEMORY) {
        return rtr_no_memory(ps);
    }
    ps->p->prediction_tokens = TD_MIN(ps->p->prediction_tokens, TD_MSG_PROMPT_TOKENS_MAX);
    return status;
}

td_status_t rtr_speculation_read(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;

    p->drafter_auto = ps->model->drafter_auto;
    p->drafter = p->drafter_auto ? TD_DRAFTER_MEMO : ps->model->drafter;
    p->k_max = ps->model->draft_max;
    TD_TRY(read_wish(ps));
    TD_TRY(read_prediction(ps));
    if (p->drafter == TD_DRAFTER_NONE || p->k_max == 0) {
        p->drafter_auto = false;
        p->drafter = TD_DRAFTER_NONE;
        p->k_min = 0;
        p->k_max = 0;
    }
    return TD_OK;
}
