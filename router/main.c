/* tandem-router: the OpenAI HTTP API, the registry of the cluster, placement. */
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_kv_codec.h"
#include "common/coord/td_coord_options.h"
#include "common/kv/td_kv_layout.h"
#include "common/node/td_routers.h"
#include "common/wire/td_member.h"
#include "common/wire/td_proc.h"
#include "router/rtr_http.h"
#include "router/rtr_model_file.h"

#define TICK_MS 50u
#define RESIGN_MS 500u /* for etcd to hear that this router takes no more */
#define FLUSH_MS 1000u /* for the last answers to leave */

typedef struct app {
    td_proc_t proc;
    rtr_metrics_t metrics;
    rtr_model_file_t model;
    rtr_slo_live_t slo;
    td_coord_t *coord; /* NULL: without etcd */
    rtr_tenants_t *tenants;
    rtr_auth_t *auth; /* NULL: no keys */
    rtr_access_t *access;
    rtr_tls_t *tls; /* NULL: plain HTTP */
    rtr_gone_t *gone;
    rtr_loop_t *loop;
    rtr_workers_t *workers;
    rtr_http_t *http;
} app_t;

static const td_option_t options[] = {
    {"id", TD_OPTION_TEXT, TD_ROUTER_ID, "name in the cluster, unique where there are several"},
    {"listen", TD_OPTION_TEXT, "tcp://127.0.0.1:5570", "ZeroMQ endpoint to bind"},
    {"advertise", TD_OPTION_TEXT, NULL, "host that other processes reach this one by"},
    {"http", TD_OPTION_TEXT, "127.0.0.1:8000", "address of the HTTP API"},
    {"tls-cert", TD_OPTION_TEXT, NULL,
     "PEM file of the API's certificate and its chain: then it speaks HTTPS; read anew when it "
     "changes"},
    {"tls-key", TD_OPTION_TEXT, NULL, "PEM file of its private key, mode 0600"},
    TD_TRACER_OPTIONS,
    {"trace-percent", TD_OPTION_COUNT, "100",
     "of requests that bring no traceparent: how many get spans, with --otlp-endpoint", 0, 100},
    {"cluster-secret-file", TD_OPTION_TEXT, NULL, "file with the cluster's secret, mode 0600"},
    {"curve", TD_OPTION_BOOL, "false", "encrypt ZeroMQ on loopback too (elsewhere always)"},
    {"log-level", TD_OPTION_CHOICE, "info", "lowest level logged", 0, 0, "error|warn|info|debug"},
    {"ready-file", TD_OPTION_TEXT, NULL, "write the API's host:port here once bound"},
    {"fault", TD_OPTION_TEXT, NULL, "test builds: STEP:kill|stop|hang[:N]"},
    TD_ETCD_OPTIONS,
    {"model", TD_OPTION_TEXT, NULL, "GGUF file of the served model"},
    {"served-model-name", TD_OPTION_TEXT, NULL, "its name in the API [the file's, without .gguf]"},
    {"block-tokens", TD_OPTION_COUNT, "16", "tokens of a KV block", 16, 1024},
    {"kv-codec", TD_OPTION_CHOICE, TD_KV_CODEC_DEFAULT, "how KV is stored, as the nodes have it", 0,
     0, TD_KV_CODEC_NAMES},
    {"context-max", TD_OPTION_COUNT, "0", "tokens of prompt and answer [the model's]", 0,
     TD_MSG_PROMPT_TOKENS_MAX},
    {"allow-placement", TD_OPTION_BOOL, "false",
     "let clients name nodes (\"tandem\") and see logits' hashes"},
    {"speculation", TD_OPTION_CHOICE, "auto", "drafter of requests that name none", 0, 0,
     "auto|none|prompt_lookup|draft_model|early_exit|memo|lookahead|medusa"},
    {"draft-max", TD_OPTION_COUNT, "16", "drafts of a step at most; 0 = no request drafts", 0,
     TD_DRAFT_TOKENS_MAX},
    {"draft-explore", TD_OPTION_COUNT, "5",
     "percent of open requests that try another drafter or bound of k, to learn", 0, 100},
    {"policy", TD_OPTION_CHOICE, "kv_aware", "how prompts are placed on nodes", 0, 0,
     RTR_POLICY_NAMES},
    {"access-log", TD_OPTION_TEXT, NULL,
     "file that each ended request gets a line in; - = standard output"},
    {"api-key-file", TD_OPTION_TEXT, NULL,
     "mode 0600; a line is a key, and what its tenant may use: then a key is needed"},
    {"admin", TD_OPTION_TEXT, NULL, "ZeroMQ endpoint of the admin RPC; none: there is no such"},
    {"admin-keys", TD_OPTION_TEXT, NULL,
     "folder of its CURVE keys; made with a first client's when it is missing"},
    {"slo-ttft-ms", TD_OPTION_MS, "0",
     "latest first token: a request that is predicted to miss it gets 429; 0 = no such limit", 0,
     RTR_SLO_MS_MAX},
    {"slo-tbt-ms", TD_OPTION_MS, "0", "the same of the mean time between tokens", 0,
     RTR_SLO_MS_MAX},
    {"self-prefill-tokens", TD_OPTION_COUNT, "128",
     "a decode node may compute so many tokens of a prompt, where that is faster; 0 = never", 0,
     RTR_SELF_TOKENS_MAX},
    {"queue-max", TD_OPTION_COUNT, "256", "prompts that may wait for room; past it 429", 0,
     RTR_TICKETS_MAX},
    {"queue-ms", TD_OPTION_MS, "5000", "longest wait for room; past it 429", 1, 3600000},
    {"request-timeout-ms", TD_OPTION_MS, "600000", "longest request; past it 504", 1, 86400000},
    {"drain-ms", TD_OPTION_MS, "5000", "for requests under way after SIGTERM", 0, 3600000},
    {"workers", TD_OPTION_COUNT, "2", "threads that parse and tokenise", 1, RTR_WORKERS_MAX},
    {"body-bytes-max", TD_OPTION_BYTES, "8M", "largest request body", 1024, 1u << 30},
    {"connections-max", TD_OPTION_COUNT, "1024", "HTTP connections", 1, 1u << 20},
    {"connections-per-ip", TD_OPTION_COUNT, "0", "of them from one address; 0 = all", 0, 1u << 20},
    {"receive-ms", TD_OPTION_MS, "60000",
     "longest time for a request's headers, and again for its body", 100, 3600000},
};

static td_status_t start_model(app_t *app)
{
    const td_config_t *config = app->proc.config;
    const char *path = td_config_text(config, "model");
    td_kv_codec_t codec = TD_KV_F16;

    if (path == NULL) {
        TD_LOG_ERROR("model not given", "expected=\"--model FILE.gguf\"");
        return TD_ERR_INVALID;
    }
    TD_TRY(td_kv_codec_parse(td_config_text(config, "kv-codec"), &codec));
    TD_TRY(rtr_model_file_load(path, td_config_text(config, "served-model-name"),
                               (uint32_t)td_config_u64(config, "context-max"),
                               (uint32_t)td_config_u64(config, "block-tokens"), codec,
                               &app->model));
    app->model.model.allow_placement = td_config_bool(config, "allow-placement");
    app->model.model.draft_max = (uint32_t)td_config_u64(config, "draft-max");
    app->model.model.drafter_auto = strcmp(td_config_text(config, "speculation"), "auto") == 0;
    if (app->model.model.drafter_auto) {
        return TD_OK;
    }
    return td_drafter_parse(td_config_text(config, "speculation"), &app->model.model.drafter);
}

static td_status_t start_tls(app_t *app)
{
    const char *cert = td_config_text(app->proc.config, "tls-cert");
    const char *key = td_config_text(app->proc.config, "tls-key");

    if (cert == NULL && key == NULL) {
        return TD_OK;
    }
    if (cert == NULL || key == NULL) {
        TD_LOG_ERROR("option missing", "expected=\"--tls-cert FILE and --tls-key FILE, both\"");
        return TD_ERR_INVALID;
    }
    return rtr_tls_open(cert, key, (uint32_t)td_config_u64(app->proc.config, "receive-ms"),
                        &app->tls);
}

/* In etcd, for nodes that look there: from now until it drains. */
static td_status_t announce(app_t *app)
{
    if (td_config_text(app->proc.config, "etcd") == NULL) {
        return TD_OK;
    }
    TD_TRY(td_coord_open_entry(app->proc.config, TD_ROUTERS_FOLDER, app->proc.id,
                               td_bus_endpoint(app->proc.bus), &app->coord));
    td_coord_campaign(app->coord);
    return TD_OK;
}

static td_status_t start(app_t *app)
{
    const td_config_t *config = app->proc.config;
    const char *keys = td_config_text(config, "api-key-file");
    uint32_t connections = (uint32_t)td_config_u64(config, "connections-max");
    rtr_loop_config_t loop = {
        .metrics = &app->metrics,
        .model = &app->model.model,
        .secret = app->proc.secret,
        .fingerprint = app->model.fingerprint,
        .block_tokens = (uint32_t)td_config_u64(config, "block-tokens"),
        .kv_codec = td_config_text(config, "kv-codec"),
        .self_tokens_max = (uint32_t)td_config_u64(config, "self-prefill-tokens"),
        .queue_max = (uint32_t)td_config_u64(config, "queue-max"),
        .queue_ms = (uint32_t)td_config_u64(config, "queue-ms"),
        .request_timeout_ms = (uint32_t)td_config_u64(config, "request-timeout-ms"),
        .draft_explore_percent = (uint32_t)td_config_u64(config, "draft-explore"),
        .admin_endpoint = td_config_text(config, "admin"),
        .admin_keys = td_config_text(config, "admin-keys"),
    };
    rtr_http_config_t http = {
        .listen = td_config_text(config, "http"),
        .router = app->proc.id,
        .connections_max = connections,
        .connections_per_ip = (uint32_t)td_config_u64(config, "connections-per-ip"),
        .receive_ms = (uint32_t)td_config_u64(config, "receive-ms"),
        .body_bytes_max = td_config_u64(config, "body-bytes-max"),
        .slo = &app->slo,
        .model = &app->model.model,
        .registry = app->proc.metrics,
        .metrics = &app->metrics,
    };

    if (loop.admin_endpoint != NULL && loop.admin_keys == NULL) {
        TD_LOG_ERROR("option missing", "expected=\"--admin-keys FOLDER beside --admin\"");
        return TD_ERR_INVALID;
    }
    atomic_init(&app->slo.ttft_ms, (uint32_t)td_config_u64(config, "slo-ttft-ms"));
    atomic_init(&app->slo.tbt_ms, (uint32_t)td_config_u64(config, "slo-tbt-ms"));
    TD_TRY(start_tls(app));
    TD_TRY(start_model(app));
    TD_TRY(rtr_policy_parse(td_config_text(config, "policy"), &loop.policy));
    TD_TRY(rtr_tenants_create(&app->tenants));
    if (keys != NULL) {
        TD_TRY(rtr_auth_load(keys, app->proc.secret, app->tenants, &app->auth));
    }
    rtr_metrics_declare(app->proc.metrics, &app->metrics);
    TD_TRY(rtr_access_create(td_config_text(config, "access-log"), &app->metrics, &app->access));
    TD_TRY(td_proc_open(&app->proc, false));
    TD_TRY(rtr_gone_create(connections, &app->gone));
    loop.bus = app->proc.bus;
    loop.gone = app->gone;
    loop.block_bytes = app->model.block_bytes;
    loop.layers = app->model.layers;
    loop.slo = &app->slo;
    loop.tenants = app->tenants;
    TD_TRY(rtr_loop_create(&loop, &app->loop));
    TD_TRY(rtr_workers_create((uint32_t)td_config_u64(config, "workers"), &app->model.model,
                              app->loop, &app->workers));
    http.auth = app->auth;
    http.access = app->access;
    http.tls = app->tls;
    http.tracer = app->proc.tracer;
    http.sample_percent = (uint32_t)td_config_u64(config, "trace-percent");
    http.tenants = app->tenants;
    http.gone = app->gone;
    http.loop = app->loop;
    http.workers = app->workers;
    TD_TRY(rtr_http_create(&http, &app->http));
    TD_TRY(announce(app));
    TD_LOG_INFO("serving", "http=%s tls=%d model=%s admin=%s", rtr_http_address(app->http),
                app->tls != NULL ? 1 : 0, app->model.name, rtr_loop_admin_endpoint(app->loop));
    td_proc_announce(&app->proc, rtr_http_address(app->http));
    return TD_OK;
}

static void run(app_t *app)
{
    uint64_t flush_ns = 0;
    struct signalfd_siginfo info;

    while (!rtr_loop_step(app->loop, app->proc.signal_fd, TICK_MS)) {
        if (app->coord != NULL) {
            td_coord_tick(app->coord);
        }
        rtr_tls_tick(app->tls, td_now_ns());
    }
    (void)!read(app->proc.signal_fd, &info, sizeof(info));
    TD_LOG_INFO("stopping", "why=signal");
    rtr_http_drain(app->http);
    if (app->coord != NULL) {
        td_coord_resign_wait(app->coord, RESIGN_MS); /* nodes that come look for others */
    }
    rtr_loop_drain(app->loop, (uint32_t)td_config_u64(app->proc.config, "drain-ms"));
    rtr_http_close_door(app->http);
    flush_ns = td_now_ns() + FLUSH_MS * TD_NS_PER_MS;
    while (rtr_gone_watched(app->gone) > 0 && td_remaining_ns(flush_ns) > 0) {
        (void)rtr_loop_step(app->loop, -1, 5);
        rtr_tickets_end_all(rtr_loop_tickets(app->loop));
    }
}

int main(int argc, char **argv)
{
    static app_t app;
    td_config_next_t next =
        td_proc_init(&app.proc, "tandem-router", TD_ROUTER_ID,
                     "Tandem's router: OpenAI-compatible HTTP API, registry and placement.",
                     options, TD_ARRAY_LEN(options), argc, argv);
    int rc = next == TD_CONFIG_EXIT_USAGE ? 2 : 0;

    if (next == TD_CONFIG_RUN) {
        rc = start(&app) == TD_OK ? 0 : 1;
        if (rc == 0) {
            run(&app);
        }
    }
    rtr_http_destroy(app.http); /* before the workers: its thread hands them requests */
    rtr_workers_destroy(app.workers);
    rtr_loop_destroy(app.loop);
    rtr_gone_destroy(app.gone);
    rtr_access_destroy(app.access);
    rtr_tls_close(app.tls);
    rtr_auth_destroy(app.auth);
    rtr_tenants_destroy(app.tenants);
    td_coord_destroy(app.coord);
    rtr_model_file_fini(&app.model);
    td_proc_fini(&app.proc);
    return rc;
}
