/* tandem-bench serve - conversations with any OpenAI-compatible server, many at once.
 *
 * A session is a conversation: a system prompt that all share, then turns, each the history and a
 * new message of words drawn from the seed. Answers go into the history as they came. Closed loop:
 * each session sends its next turn when the last one has ended. Open loop: arrivals are a Poisson
 * process; each takes the session that has been idle longest, or begins a new one.
 *
 * With --direct each session holds two conversations, one through each address, and never speaks
 * with both at once; who goes first alternates. Figures are of --url alone. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_samples.h"
#include "tests/bench/bench_stream.h"
#include "tests/bench/bench_words.h"

#define SERVE_SESSIONS_MAX 1024u            /* at once; an arrival past it is an error */
#define SERVE_TURNS_DEFAULT 4u              /* of a conversation */
#define SERVE_LANES 2u                      /* --url, --direct */
#define SERVE_ERRORS_SHOWN 8u               /* texts; further ones are only counted */
#define SERVE_PAUSE_NS (200 * TD_NS_PER_MS) /* of a session after an error */
#define SERVE_WORDS_MAX 100000u

typedef struct serve_options {
    const char *urls[SERVE_LANES]; /* [1] = --direct, or NULL */
    const char *model;             /* NULL = the first that the server lists */
    const char *key;
    uint32_t sessions;
    uint32_t turns;   /* 0 = SERVE_TURNS_DEFAULT, and conversations begin anew while time is left */
    uint32_t seconds; /* 0 = no limit */
    uint32_t seed;
    uint32_t system_tokens;
    uint32_t prompt_tokens;
    uint32_t new_tokens;
    uint32_t max_tokens;
    uint32_t timeout_s;
    double rate; /* requests/s; 0 = closed loop */
    bool ignore_eos;
    bool json;
} serve_options_t;

struct serve;

/* One conversation with one address. */
typedef struct serve_lane {
    struct serve *serve;   /* borrowed */
    json_t *messages;      /* owned; the history, and the question while it waits for its answer */
    bench_stream_t stream; /* CURLOPT_PRIVATE is the session */
    bool counted;          /* through --url: its times are figures */
} serve_lane_t;

typedef struct serve_session {
    serve_lane_t lanes[SERVE_LANES];
    uint64_t words;    /* state of this conversation's words */
    uint64_t ready_ns; /* idle since, or until after an error */
    uint32_t requests; /* ended in this conversation, over all lanes */
    uint32_t lane;     /* of the request under way */
    bool busy;
    bool ended; /* has had all of its turns */
} serve_session_t;

typedef struct serve {
    serve_options_t options;
    CURLM *multi;
    char *model;             /* owned */
    char *urls[SERVE_LANES]; /* owned */
    uint32_t lanes;
    serve_session_t *sessions; /* owned; [SERVE_SESSIONS_MAX] */
    uint32_t session_count;
    uint32_t busy_count;
    uint32_t conversations; /* begun; numbers their words */
    uint64_t random;        /* state of the arrivals */
    uint64_t begin_ns;
    uint64_t arrival_ns; /* of the next request in an open loop */
    uint64_t sent;       /* requests, all lanes */

    /* figures */
    uint64_t requests; /* whole answers */
    uint64_t errors;
    uint64_t prompt_tokens;
    uint64_t completion_tokens;
    uint64_t cached_tokens;
    bool has_cached;
    uint64_t last_end_ns;
    bench_samples_t ttft;
    bench_samples_t tbt;
    bench_samples_t e2e[SERVE_LANES];
    char errors_seen[SERVE_ERRORS_SHOWN][BENCH_ERROR_BYTES];
    uint32_t errors_shown;

    /* progress */
    uint64_t pieces;
    uint64_t shown_pieces;
    uint64_t shown_ns;
} serve_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench serve --url URL [options]\n"
        "\n"
        "Holds conversations with an OpenAI-compatible server (/v1/chat/completions, streaming,\n"
        "temperature 0). All share a system prompt; each turn adds a message of words drawn from\n"
        "the seed, and answers stay in the history. A server that has seen a seed may have cached\n"
        "its prompts.\n"
        "\n"
        "Options:\n"
        "  --url URL          http://HOST:PORT, with or without /v1 (required)\n"
        "  --sessions N       conversations at once, default 16\n"
        "  --turns T          turns of each, then it ends; default 4\n"
        "  --seconds S        no request is sent after S seconds; those under way end. With S and\n"
        "                     without T, new conversations follow those that have had 4 turns\n"
        "  --rate R           open loop: R requests a second arrive at random (Poisson), sessions\n"
        "                     * turns of them, or as many as S seconds bring; default 0 = closed "
        "loop:\n"
        "                     a session's next turn follows its last one\n"
        "  --system-tokens N  about so many tokens of system prompt, default 200; 0 = none\n"
        "  --prompt-tokens N  of each first message, default 200\n"
        "  --new-tokens N     of each later message, default 50\n"
        "  --max-tokens N     longest answer, default 64\n"
        "  --ignore-eos       answers have exactly --max-tokens (an extension of Tandem and "
        "llama.cpp)\n"
        "  --model NAME       default: the first one that the server lists\n"
        "  --key KEY          API key\n"
        "  --direct URL       also ask there, turn by turn, and report the difference of the two\n"
        "                     median request times as added_ms_p50\n"
        "  --seed N           default 1\n"
        "  --timeout S        of one request, default 120\n"
        "  --json             one JSON object instead of a table\n"
        "  --help             this text\n"
        "\n"
        "Exit code 1 if a request failed.");
}

/* --- conversations ---------------------------------------------------------------------------- */

static uint32_t turns_of(const serve_options_t *o)
{
    return o->turns == 0 ? SERVE_TURNS_DEFAULT : o->turns;
}

/* Both lanes have the same number of words, but other ones. */
static bool begin_conversation(serve_t *serve, serve_session_t *session)
{
    session->words = ((uint64_t)serve->options.seed << 32) + ++serve->conversations;
    session->requests = 0;
    for (uint32_t l = 0; l < serve->lanes; l++) {
        serve_lane_t *lane = &session->lanes[l];
        uint64_t state = serve->options.seed; /* the same for all */

        json_decref(lane->messages);
        lane->messages = json_array();
        if (lane->messages == NULL ||
            (serve->options.system_tokens > 0 &&
             json_array_append_new(
                 lane->messages,
                 bench_message_of_words("system", serve->options.system_tokens, &state)) != 0)) {
            return false;
        }
    }
    return true;
}

static void on_piece(void *ctx, uint64_t now_ns, uint64_t previous_ns)
{
    serve_lane_t *lane = ctx;

    if (lane->counted) {
        lane->serve->pieces++;
        if (previous_ns != 0) {
            bench_samples_add_ns(&lane->serve->tbt, now_ns - previous_ns);
        }
    }
}

/* A session that is new, or one that ended before. */
static serve_session_t *add_session(serve_t *serve)
{
    serve_session_t *session = &serve->sessions[serve->session_count++];

    for (uint32_t l = 0; l < serve->lanes; l++) {
        serve_lane_t *lane = &session->lanes[l];
        *lane = (serve_lane_t){.serve = serve, .counted = l == 0};
        if (bench_stream_init(&lane->stream, serve->urls[l], serve->options.key,
                              serve->options.timeout_s * 1000) != BENCH_EXIT_OK ||
            curl_easy_setopt(lane->stream.curl, CURLOPT_PRIVATE, session) != CURLE_OK) {
            return NULL;
        }
        lane->stream.on_piece = on_piece;
        lane->stream.ctx = lane;
    }
    session->ready_ns = td_now_ns();
    return begin_conversation(serve, session) ? session : NULL;
}

/* The body of a lane's next request: its history with one message more. NULL without memory. */
static char *next_body(serve_t *serve, serve_session_t *session, serve_lane_t *lane)
{
    const serve_options_t *o = &serve->options;
    bool is_first = json_array_size(lane->messages) < 2; /* nothing, or the system prompt */
    json_t *body = NULL;
    char *text = NULL;
    char *copy = NULL;

    if (json_array_append_new(lane->messages,
                              bench_message_of_words("user",
                                                     is_first ? o->prompt_tokens : o->new_tokens,
                                                     &session->words)) != 0) {
        return NULL;
    }
    body = json_pack("{s:s, s:O, s:b, s:{s:b}, s:i, s:i}", "model", serve->model, "messages",
                     lane->messages, "stream", 1, "stream_options", "include_usage", 1,
                     "temperature", 0, "max_tokens", (int)o->max_tokens);
    if (body != NULL &&
        (!o->ignore_eos || json_object_set_new(body, "ignore_eos", json_true()) == 0)) {
        text = json_dumps(body, JSON_COMPACT);
        copy = text == NULL ? NULL : td_strdup(text); /* jansson's memory to ours */
    }
    free(text);
    json_decref(body);
    return copy;
}

/* Sends a session's next request. since_ns: when it should have been sent. */
static bool send_next(serve_t *serve, serve_session_t *session, uint64_t since_ns)
{
    uint32_t turn = session->requests / serve->lanes;
    serve_lane_t *lane = NULL;
    char *body = NULL;

    session->lane = serve->lanes == 1 ? 0 : (session->requests + turn) % serve->lanes;
    lane = &session->lanes[session->lane];
    body = next_body(serve, session, lane);
    if (body == NULL) {
        return false;
    }
    bench_stream_begin(&lane->stream, body);
    lane->stream.sent_ns = TD_MIN(lane->stream.sent_ns, since_ns);
    if (curl_multi_add_handle(serve->multi, lane->stream.curl) != CURLM_OK) {
        return false;
    }
    session->busy = true;
    serve->busy_count++;
    serve->sent++;
    return true;
}

/* --- what came -------------------------------------------------------------------------------- */

static void show_error(serve_t *serve, const char *text)
{
    for (uint32_t i = 0; i < serve->errors_shown; i++) {
        if (strcmp(serve->errors_seen[i], text) == 0) {
            return;
        }
    }
    if (serve->errors_shown < SERVE_ERRORS_SHOWN) {
        (void)snprintf(serve->errors_seen[serve->errors_shown++], BENCH_ERROR_BYTES, "%s", text);
        (void)fprintf(stderr, "tandem-bench: a request failed: %s\n", text);
    }
}

static void count_answer(serve_t *serve, const serve_session_t *session, const bench_stream_t *s)
{
    serve->last_end_ns = s->end_ns;
    if (s->error[0] != '\0') {
        serve->errors++;
        show_error(serve, s->error);
        return;
    }
    bench_samples_add_ns(&serve->e2e[session->lane], s->end_ns - s->sent_ns);
    if (session->lane != 0) {
        return;
    }
    serve->requests++;
    serve->prompt_tokens += s->prompt_tokens;
    serve->completion_tokens += bench_stream_tokens(s);
    serve->cached_tokens += s->cached_tokens;
    serve->has_cached = serve->has_cached || s->has_cached;
    if (s->first_ns != 0) {
        bench_samples_add_ns(&serve->ttft, s->first_ns - s->sent_ns);
    }
}

/* The history gets the answer; after an error the question leaves it, as if it had not been asked.
 */
static bool keep_answer(serve_lane_t *lane)
{
    const td_str_t *text = &lane->stream.text;

    if (lane->stream.error[0] != '\0') {
        return json_array_remove(lane->messages, json_array_size(lane->messages) - 1) == 0;
    }
    return json_array_append_new(lane->messages,
                                 json_pack("{s:s, s:s%}", "role", "assistant", "content",
                                           text->bytes == NULL ? "" : text->bytes, text->len)) == 0;
}

static bool end_request(serve_t *serve, serve_session_t *session, CURLcode code)
{
    serve_lane_t *lane = &session->lanes[session->lane];
    bool anew = serve->options.turns == 0 && serve->options.seconds > 0;

    (void)curl_multi_remove_handle(serve->multi, lane->stream.curl);
    bench_stream_end(&lane->stream, code);
    count_answer(serve, session, &lane->stream);
    session->busy = false;
    serve->busy_count--;
    session->ready_ns = lane->stream.end_ns + (lane->stream.error[0] != '\0' ? SERVE_PAUSE_NS : 0);
    session->requests++;
    if (!keep_answer(lane)) {
        return false;
    }
    if (session->requests < turns_of(&serve->options) * serve->lanes) {
        return true;
    }
    session->ended = !anew;
    return !anew || begin_conversation(serve, session);
}

/* --- when to send ----------------------------------------------------------------------------- */

/* In (0, 1]. */
static double next_unit(uint64_t *state)
{
    return ((double)(bench_random(state) >> 11) + 1) * 0x1p-53;
}

static bool time_is_left(const serve_t *serve, uint64_t now_ns)
{
    return serve->options.seconds == 0 ||
           now_ns < serve->begin_ns + serve->options.seconds * TD_NS_PER_S;
}

/* Requests of an open loop, if nothing else ends it. */
static uint64_t arrivals_max(const serve_t *serve)
{
    const serve_options_t *o = &serve->options;
    return o->turns == 0 && o->seconds > 0 ? UINT64_MAX
                                           : (uint64_t)o->sessions * turns_of(o) * serve->lanes;
}

static serve_session_t *longest_idle(serve_t *serve)
{
    serve_session_t *found = NULL;

    for (uint32_t i = 0; i < serve->session_count; i++) {
        serve_session_t *session = &serve->sessions[i];
        if (!session->busy && !session->ended &&
            (found == NULL || session->ready_ns < found->ready_ns)) {
            found = session;
        }
    }
    return found;
}

/* A session whose place is free for a new conversation, or a new one; NULL when there is none. */
static serve_session_t *new_session(serve_t *serve)
{
    for (uint32_t i = 0; i < serve->session_count; i++) {
        serve_session_t *session = &serve->sessions[i];
        if (session->ended && !session->busy) {
            session->ended = false;
            return begin_conversation(serve, session) ? session : NULL;
        }
    }
    return serve->session_count < SERVE_SESSIONS_MAX ? add_session(serve) : NULL;
}

static bool send_open(serve_t *serve, uint64_t now_ns)
{
    while (serve->arrival_ns <= now_ns && serve->sent < arrivals_max(serve)) {
        serve_session_t *session = longest_idle(serve);
        uint64_t gap_ns =
            (uint64_t)(-log(next_unit(&serve->random)) / serve->options.rate * TD_NS_PER_S);

        session = session == NULL ? new_session(serve) : session;
        if (session != NULL) {
            if (!send_next(serve, session, serve->arrival_ns)) {
                return false;
            }
        } else {
            serve->errors++;
            serve->sent++;
            show_error(serve, "not sent: as many requests as are possible at once are under way");
        }
        serve->arrival_ns += gap_ns;
    }
    return true;
}

static bool send_closed(serve_t *serve, uint64_t now_ns)
{
    for (uint32_t i = 0; i < serve->session_count; i++) {
        serve_session_t *session = &serve->sessions[i];
        if (!session->busy && !session->ended && session->ready_ns <= now_ns &&
            !send_next(serve, session, UINT64_MAX)) {
            return false;
        }
    }
    return true;
}

/* When something is to be sent next; UINT64_MAX = only after an answer. */
static uint64_t next_send_ns(const serve_t *serve)
{
    uint64_t next_ns = UINT64_MAX;

    if (serve->options.rate > 0) {
        return serve->sent < arrivals_max(serve) ? serve->arrival_ns : UINT64_MAX;
    }
    for (uint32_t i = 0; i < serve->session_count; i++) {
        if (!serve->sessions[i].busy && !serve->sessions[i].ended) {
            next_ns = TD_MIN(next_ns, serve->sessions[i].ready_ns);
        }
    }
    return next_ns;
}

/* --- the loop --------------------------------------------------------------------------------- */

static void show_progress(serve_t *serve, uint64_t now_ns)
{
    double s = (double)(now_ns - serve->shown_ns) / TD_NS_PER_S;

    (void)fprintf(stderr,
                  "tandem-bench: %.0f s: %llu answers, %llu errors, %u under way, %.0f pieces/s\n",
                  (double)(now_ns - serve->begin_ns) / TD_NS_PER_S,
                  (unsigned long long)serve->requests, (unsigned long long)serve->errors,
                  serve->busy_count, (double)(serve->pieces - serve->shown_pieces) / s);
    serve->shown_ns = now_ns;
    serve->shown_pieces = serve->pieces;
}

/* Takes what has ended; false when the bench itself cannot go on. */
static bool take_ended(serve_t *serve, uint32_t *ended_out)
{
    CURLMsg *message = NULL;
    int left = 0;

    *ended_out = 0;
    while ((message = curl_multi_info_read(serve->multi, &left)) != NULL) {
        char *session = NULL;
        CURLcode code = message->data.result;
        if (message->msg == CURLMSG_DONE) {
            (void)curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &session);
            if (!end_request(serve, (serve_session_t *)(void *)session, code)) {
                return false;
            }
            ++*ended_out;
        }
    }
    return true;
}

static bool wait_until_ns(serve_t *serve, uint64_t until_ns)
{
    uint64_t wait_ns = td_remaining_ns(until_ns);
    return curl_multi_poll(serve->multi, NULL, 0,
                           (int)((wait_ns + TD_NS_PER_MS - 1) / TD_NS_PER_MS), NULL) == CURLM_OK;
}

/* False when the bench itself cannot go on. */
static bool serve_loop(serve_t *serve)
{
    for (;;) {
        uint64_t now_ns = td_now_ns();
        uint64_t next_ns = UINT64_MAX;
        uint32_t ended = 0;
        int running = 0;

        if (time_is_left(serve, now_ns)) {
            bool is_open = serve->options.rate > 0;
            if (!(is_open ? send_open(serve, now_ns) : send_closed(serve, now_ns))) {
                return false;
            }
            next_ns = next_send_ns(serve);
        }
        if (serve->busy_count == 0 && next_ns == UINT64_MAX) {
            return true;
        }
        if (curl_multi_perform(serve->multi, &running) != CURLM_OK || !take_ended(serve, &ended)) {
            return false;
        }
        /* Whose request has ended may send the next one at once. */
        if (ended == 0 && !wait_until_ns(serve, TD_MIN(next_ns, serve->shown_ns + TD_NS_PER_S))) {
            return false;
        }
        if (td_now_ns() >= serve->shown_ns + TD_NS_PER_S) {
            show_progress(serve, td_now_ns());
        }
    }
}

/* --- figures ---------------------------------------------------------------------------------- */

static void set_count(json_t *figures, const char *key, uint64_t value)
{
    (void)json_object_set_new(figures, key, json_integer((json_int_t)value));
}

static void set_real(json_t *figures, const char *key, double value)
{
    (void)json_object_set_new(figures, key, json_real(value));
}

static json_t *figures_of(serve_t *serve)
{
    static const uint32_t p50_90_99[] = {50, 90, 99, 0};
    double wall_s = (double)(serve->last_end_ns - serve->begin_ns) / TD_NS_PER_S;
    json_t *figures = json_object();

    set_count(figures, "requests", serve->requests);
    set_count(figures, "errors", serve->errors);
    set_real(figures, "wall_s", wall_s);
    set_real(figures, "requests_s", (double)serve->requests / wall_s);
    if (serve->lanes > 1 && serve->e2e[0].count > 0 && serve->e2e[1].count > 0) {
        set_real(figures, "added_ms_p50",
                 bench_samples_percentile(&serve->e2e[0], 50) -
                     bench_samples_percentile(&serve->e2e[1], 50));
    }
    set_count(figures, "prompt_tokens", serve->prompt_tokens);
    set_count(figures, "completion_tokens", serve->completion_tokens);
    set_real(figures, "prompt_tok_s", (double)serve->prompt_tokens / wall_s);
    set_real(figures, "tok_s", (double)serve->completion_tokens / wall_s);
    bench_samples_report(&serve->ttft, "ttft_ms", p50_90_99, figures);
    bench_samples_report(&serve->tbt, "tbt_ms", p50_90_99, figures);
    bench_samples_report(&serve->e2e[0], "e2e_ms", p50_90_99, figures);
    if (serve->has_cached && serve->prompt_tokens > 0) {
        set_count(figures, "cached_tokens", serve->cached_tokens);
        set_real(figures, "cached_fraction",
                 (double)serve->cached_tokens / (double)serve->prompt_tokens);
    }
    return figures;
}

/* --- options ---------------------------------------------------------------------------------- */

static bool parse_rate(char *text, void *out)
{
    char *end = NULL;
    double rate = strtod(text, &end);

    if (end == text || *end != '\0' || !(rate == 0 || (rate >= 1e-3 && rate <= 1e6))) {
        (void)bench_usage_error(
            "--rate wants 0, or requests a second from 0.001 to 1000000, not \"%s\"", text);
        return false;
    }
    *(double *)out = rate;
    return true;
}

static bool parse_url(char *text, void *out)
{
    if (strncmp(text, "http://", 7) != 0 && strncmp(text, "https://", 8) != 0) {
        (void)bench_usage_error("a server is http://HOST:PORT, not \"%s\"", text);
        return false;
    }
    *(const char **)out = text;
    return true;
}

static int parse_options(int argc, char **argv, serve_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "url",
         .kind = BENCH_OWN,
         .out = &o->urls[0],
         .parse = parse_url,
         .required = true},
        {.name = "direct", .kind = BENCH_OWN, .out = &o->urls[1], .parse = parse_url},
        {.name = "rate", .kind = BENCH_OWN, .out = &o->rate, .parse = parse_rate},
        {.name = "model", .kind = BENCH_TEXT, .out = &o->model},
        {.name = "key", .kind = BENCH_TEXT, .out = &o->key},
        {.name = "sessions",
         .kind = BENCH_NUMBER,
         .out = &o->sessions,
         .min = 1,
         .max = SERVE_SESSIONS_MAX},
        {.name = "turns", .kind = BENCH_NUMBER, .out = &o->turns, .min = 1, .max = 1000000},
        {.name = "seconds", .kind = BENCH_NUMBER, .out = &o->seconds, .min = 1, .max = 1000000},
        {.name = "seed", .kind = BENCH_NUMBER, .out = &o->seed, .min = 0, .max = UINT32_MAX},
        {.name = "system-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->system_tokens,
         .min = 0,
         .max = SERVE_WORDS_MAX},
        {.name = "prompt-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->prompt_tokens,
         .min = 1,
         .max = SERVE_WORDS_MAX},
        {.name = "new-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->new_tokens,
         .min = 1,
         .max = SERVE_WORDS_MAX},
        {.name = "max-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->max_tokens,
         .min = 1,
         .max = SERVE_WORDS_MAX},
        {.name = "timeout", .kind = BENCH_NUMBER, .out = &o->timeout_s, .min = 1, .max = 1000000},
        {.name = "ignore-eos", .kind = BENCH_FLAG, .out = &o->ignore_eos},
        BENCH_JSON_OPTION(&o->json),
    };
    int rc = bench_parse_options(argc, argv, "serve", print_help, options, TD_ARRAY_LEN(options));

    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    if (o->urls[1] != NULL && o->rate > 0) {
        return bench_usage_error("--direct compares closed loops: leave out --rate");
    }
    return BENCH_EXIT_OK;
}

/* --- start and end ---------------------------------------------------------------------------- */

static int serve_init(serve_t *serve)
{
    const serve_options_t *o = &serve->options;
    int rc = BENCH_EXIT_OK;

    if (o->model == NULL) {
        rc = bench_model_name(o->urls[0], o->key, &serve->model);
    } else {
        serve->model = td_strdup(o->model);
    }
    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    serve->lanes = o->urls[1] == NULL ? 1 : 2;
    for (uint32_t l = 0; l < serve->lanes; l++) {
        serve->urls[l] = bench_api_url(o->urls[l], "/chat/completions");
    }
    serve->random = ~(uint64_t)o->seed;
    serve->multi = curl_multi_init();
    serve->sessions = td_calloc(SERVE_SESSIONS_MAX, sizeof(*serve->sessions));
    if (serve->model == NULL || serve->urls[0] == NULL || serve->multi == NULL ||
        serve->sessions == NULL || (serve->lanes > 1 && serve->urls[1] == NULL)) {
        (void)bench_usage_error("no memory");
        return BENCH_EXIT_FAILED;
    }
    /* Sessions keep their connections between turns. */
    (void)curl_multi_setopt(serve->multi, CURLMOPT_MAXCONNECTS, (long)SERVE_SESSIONS_MAX);
    for (uint32_t i = 0; i < o->sessions; i++) {
        if (add_session(serve) == NULL) {
            return BENCH_EXIT_FAILED;
        }
    }
    return BENCH_EXIT_OK;
}

static void serve_fini(serve_t *serve)
{
    for (uint32_t i = 0; i < serve->session_count; i++) {
        for (uint32_t l = 0; l < serve->lanes; l++) {
            serve_lane_t *lane = &serve->sessions[i].lanes[l];
            if (serve->sessions[i].busy && serve->sessions[i].lane == l) {
                (void)curl_multi_remove_handle(serve->multi, lane->stream.curl);
            }
            bench_stream_fini(&lane->stream);
            json_decref(lane->messages);
        }
    }
    for (uint32_t l = 0; l < SERVE_LANES; l++) {
        td_free(serve->urls[l]);
        bench_samples_fini(&serve->e2e[l]);
    }
    bench_samples_fini(&serve->ttft);
    bench_samples_fini(&serve->tbt);
    (void)curl_multi_cleanup(serve->multi);
    td_free(serve->sessions);
    td_free(serve->model);
}

static int serve_run(serve_t *serve)
{
    json_t *figures = NULL;

    serve->begin_ns = td_now_ns();
    serve->shown_ns = serve->begin_ns;
    serve->arrival_ns = serve->begin_ns;
    serve->last_end_ns = serve->begin_ns + 1; /* wall time is never 0 */
    if (!serve_loop(serve)) {
        (void)bench_usage_error("stopped: no memory, or libcurl failed");
        return BENCH_EXIT_FAILED;
    }
    figures = figures_of(serve);
    bench_print_figures(figures, serve->options.json);
    json_decref(figures);
    return serve->errors == 0 ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

int bench_serve(int argc, char **argv)
{
    static serve_t serve = {.options = {.sessions = 16,
                                        .seed = 1,
                                        .system_tokens = 200,
                                        .prompt_tokens = 200,
                                        .new_tokens = 50,
                                        .max_tokens = 64,
                                        .timeout_s = 120}};
    int rc = parse_options(argc, argv, &serve.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    (void)signal(SIGPIPE, SIG_IGN); /* a server that leaves is an error of one request */
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        (void)bench_usage_error("libcurl does not start");
        return BENCH_EXIT_FAILED;
    }
    rc = serve_init(&serve);
    if (rc == BENCH_EXIT_OK) {
        rc = serve_run(&serve);
    }
    serve_fini(&serve);
    curl_global_cleanup();
    return rc;
}
