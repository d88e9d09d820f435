/* tandemctl: what operators ask a router, and order; a client of the admin RPC. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#include "common/base/td_names.h"
#include "router/ctl.h"
#include "router/rtr_auth.h"

#define Z85_CHARS 40u
#define ANSWER_MS 5000
#define LEASE_MS 20000u /* of a subscription; renewed at half of it */
#define PROMPT_BYTES_MAX (192u << 10)
#define KEYS_MAX 4096u
#define NO_ANSWER 3

typedef struct options {
    const char *router; /* NULL: the file `endpoint` of the keys' folder says */
    const char *keys;
    bool json;
    double watch_s; /* 0: once */
    bool follow;
    ctl_request_t request;
} options_t;

#define API_KEY_PREFIX "sk-"
#define API_KEY_BYTES 32u

static const char *const usage_text =
    "Usage: tandemctl [options] COMMAND\n"
    "\n"
    "Asks a running tandem-router, started with --admin and --admin-keys, over its admin RPC.\n"
    "\n"
    "Commands:\n"
    "  status               the router: model, requests by outcome, retries, tokens\n"
    "  nodes                all nodes: state, load, memory\n"
    "  drain NODE           nothing new is placed there; what is under way goes on\n"
    "  undrain NODE         back into placement\n"
    "  pin | unpin | evict  blocks in the store, of a prompt or by keys (options below)\n"
    "  speculation          what drafts were worth; with --explore N changes the policy\n"
    "  policy [NAME]        how prompts are placed on nodes; with a name changes it\n"
    "  slo                  latest first token, and time between tokens; --ttft, --tbt change "
    "them\n"
    "  tenants              who asks, by API key: limits, requests, tokens, waiting\n"
    "  calibration          how fast nodes are, as learned; --json is what tandem-sim reads\n"
    "  trace [REQUEST]      how a request (x-request-id), or the newest ones, were placed, and "
    "why\n"
    "  events               what happened lately; with --follow also what happens from now on\n"
    "  keygen FILE          makes a client's key; prints the public one, for the file `allow`\n"
    "  apikey NAME          makes an API key; prints it, and its line for the router's file\n"
    "\n"
    "Options:\n"
    "  --keys DIR           folder with router.pub and admin.key (or $TANDEM_ADMIN_KEYS)\n"
    "  --router ENDPOINT    where the RPC is bound (or $TANDEM_ADMIN; default: DIR/endpoint)\n"
    "  --json               one line of JSON for each answer or event\n"
    "  --watch SECONDS      asks again and again\n"
    "  --prompt TEXT, --prompt-file FILE, --salt TEXT, --tenant NAME, --key HEX (several)\n"
    "                       what to pin\n"
    "  --soft               pin for half an hour, not for good\n"
    "  --explore PERCENT    of the requests that leave their drafter open\n"
    "  --ttft MS, --tbt MS  objectives of requests that bring none; 0: no such limit\n"
    "  --since NUMBER       first event; default 1, all that are kept\n"
    "  --follow             waits for further events\n"
    "  --help, --version\n"
    "\n"
    "Exit code: 0; 1 the router refused; 2 wrong usage; 3 no answer.\n";

static int usage(const char *what, const char *which)
{
    (void)fprintf(stderr, "tandemctl: %s%s\nTry tandemctl --help.\n", what, which);
    return 2;
}

/* --- the command line ------------------------------------------------------------------------- */

static int command_of(const char *name)
{
    static const char *const names[CTL_COMMANDS] = {
        "status", "nodes", "drain",   "undrain",     "pin",   "unpin",  "evict",  "speculation",
        "policy", "slo",   "tenants", "calibration", "trace", "events", "keygen", "apikey"};
    for (int i = 0; i < CTL_COMMANDS; i++) {
        if (strcmp(name, names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static bool read_number(const char *text, uint64_t most, uint64_t *out)
{
    char *end = NULL;

    errno = 0;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && *out <= most;
}

static bool read_ms(const char *text, uint32_t *out)
{
    uint64_t number = 0;

    if (!read_number(text, 86400000, &number)) {
        return false;
    }
    *out = (uint32_t)number;
    return true;
}

/* A file's text, which the caller frees, or NULL: said why. */
static char *read_file(const char *path, size_t most)
{
    FILE *file = fopen(path, "re");
    char *text = file == NULL ? NULL : malloc(most + 2);
    size_t len = 0;

    if (text == NULL) {
        (void)fprintf(stderr, "tandemctl: %s: %s\n", path, strerror(errno));
        if (file != NULL) {
            (void)fclose(file);
        }
        return NULL;
    }
    len = fread(text, 1, most + 1, file);
    (void)fclose(file);
    if (len > most || memchr(text, '\0', len) != NULL) {
        (void)fprintf(stderr, "tandemctl: %s: text of at most %zu bytes is expected\n", path, most);
        free(text);
        return NULL;
    }
    text[len] = '\0';
    return text;
}

/* Adds a key to those of the request. */
static bool add_key(ctl_request_t *r, const char *hex)
{
    static uint8_t keys[KEYS_MAX][CTL_KEY_BYTES];
    size_t len = 0;
    const char *end = NULL;

    if (r->key_count == KEYS_MAX ||
        sodium_hex2bin(keys[r->key_count], CTL_KEY_BYTES, hex, strlen(hex), NULL, &len, &end) !=
            0 ||
        len != CTL_KEY_BYTES || *end != '\0') {
        return false;
    }
    r->keys = keys[0];
    r->key_count++;
    return true;
}

enum {
    OPT_ROUTER = 256,
    OPT_KEYS,
    OPT_JSON,
    OPT_WATCH,
    OPT_PROMPT,
    OPT_PROMPT_FILE,
    OPT_SALT,
    OPT_TENANT,
    OPT_KEY,
    OPT_SOFT,
    OPT_EXPLORE,
    OPT_TTFT,
    OPT_TBT,
    OPT_SINCE,
    OPT_FOLLOW,
    OPT_HELP,
    OPT_VERSION
};

/* Takes one option. Answers its text's fault, or NULL. */
static const char *take_option(options_t *o, int option, const char *value)
{
    uint64_t number = 0;
    char *end = NULL;

    switch (option) {
    case OPT_ROUTER:
        o->router = value;
        return NULL;
    case OPT_KEYS:
        o->keys = value;
        return NULL;
    case OPT_JSON:
        o->json = true;
        return NULL;
    case OPT_WATCH:
        o->watch_s = strtod(value, &end);
        return *end == '\0' && o->watch_s >= 0.1 && o->watch_s <= 86400
                   ? NULL
                   : "--watch: seconds from 0.1 to 86400 are expected, not ";
    case OPT_PROMPT:
        o->request.prompt = value;
        return NULL;
    case OPT_PROMPT_FILE:
        o->request.prompt = read_file(value, PROMPT_BYTES_MAX); /* lives as long as we do */
        return o->request.prompt != NULL ? NULL : "--prompt-file: not read: ";
    case OPT_SALT:
        o->request.salt = value;
        return NULL;
    case OPT_TENANT:
        o->request.tenant = value;
        return NULL;
    case OPT_KEY:
        return add_key(&o->request, value) ? NULL
                                           : "--key: 32 hexadecimal digits are expected, not ";
    case OPT_SOFT:
        o->request.soft = true;
        return NULL;
    case OPT_EXPLORE:
        o->request.set_explore = true;
        if (!read_number(value, 100, &number)) {
            return "--explore: 0 to 100 is expected, not ";
        }
        o->request.explore_percent = (uint32_t)number;
        return NULL;
    case OPT_TTFT:
        o->request.set_ttft = true;
        return read_ms(value, &o->request.ttft_ms) ? NULL
                                                   : "--ttft: milliseconds are expected, not ";
    case OPT_TBT:
        o->request.set_tbt = true;
        return read_ms(value, &o->request.tbt_ms) ? NULL : "--tbt: milliseconds are expected, not ";
    case OPT_SINCE:
        return read_number(value, UINT64_MAX, &o->request.since) && o->request.since > 0
                   ? NULL
                   : "--since: a number from 1 on is expected, not ";
    default:
        o->follow = true;
        return NULL;
    }
}

static const struct option long_options[] = {
    {"router", required_argument, NULL, OPT_ROUTER},
    {"keys", required_argument, NULL, OPT_KEYS},
    {"json", no_argument, NULL, OPT_JSON},
    {"watch", required_argument, NULL, OPT_WATCH},
    {"prompt", required_argument, NULL, OPT_PROMPT},
    {"prompt-file", required_argument, NULL, OPT_PROMPT_FILE},
    {"salt", required_argument, NULL, OPT_SALT},
    {"tenant", required_argument, NULL, OPT_TENANT},
    {"key", required_argument, NULL, OPT_KEY},
    {"soft", no_argument, NULL, OPT_SOFT},
    {"explore", required_argument, NULL, OPT_EXPLORE},
    {"ttft", required_argument, NULL, OPT_TTFT},
    {"tbt", required_argument, NULL, OPT_TBT},
    {"since", required_argument, NULL, OPT_SINCE},
    {"follow", no_argument, NULL, OPT_FOLLOW},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0}};

/* What a command needs besides its name. Answers an exit code, or -1. */
static int check_command(options_t *o, int argc, char **argv)
{
    ctl_request_t *r = &o->request;
    const int command = argc > 0 ? command_of(argv[0]) : -1;
    const bool is_local = command == CTL_KEYGEN || command == CTL_APIKEY;
    const bool names_something = command == CTL_DRAIN || command == CTL_UNDRAIN || is_local;

    if (argc == 0) {
        return usage("a command is expected", "");
    }
    if (command < 0) {
        return usage("no such command: ", argv[0]);
    }
    if (argc != (names_something ? 2 : 1) &&
        !((command == CTL_POLICY || command == CTL_TRACE) && argc == 2)) {
        return usage(names_something ? "one name is expected behind "
                                     : "nothing is expected behind ",
                     argv[0]);
    }
    r->command = (ctl_command_t)command;
    r->node = argc == 2 ? argv[1] : NULL;
    if ((command == CTL_PIN || command == CTL_UNPIN || command == CTL_EVICT) &&
        (r->prompt == NULL) == (r->key_count == 0)) {
        return usage("either --prompt (or --prompt-file) or --key is expected with ", argv[0]);
    }
    if (!is_local && o->keys == NULL) {
        return usage("--keys DIR or $TANDEM_ADMIN_KEYS is expected", "");
    }
    r->since = r->since == 0 ? 1 : r->since;
    r->lease_ms = o->follow ? LEASE_MS : 0;
    return -1;
}

static int read_command_line(options_t *o, int argc, char **argv)
{
    int option = 0;

    o->router = getenv("TANDEM_ADMIN");
    o->keys = getenv("TANDEM_ADMIN_KEYS");
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        const char *fault = NULL;
        if (option == '?') {
            (void)fputs("Try tandemctl --help.\n", stderr);
            return 2;
        }
        if (option == OPT_HELP || option == OPT_VERSION) {
            (void)fputs(option == OPT_HELP ? usage_text : "tandemctl " TD_VERSION "\n", stdout);
            return 0;
        }
        fault = take_option(o, option, optarg);
        if (fault != NULL) {
            return usage(fault, optarg == NULL ? "" : optarg);
        }
    }
    return check_command(o, argc - optind, argv + optind);
}

/* --- keys ------------------------------------------------------------------------------------- */

static int make_key(const char *path)
{
    char public_key[Z85_CHARS + 1];
    char secret_key[Z85_CHARS + 1];
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    bool bad = file == NULL || zmq_curve_keypair(public_key, secret_key) != 0;

    bad = bad || fprintf(file, "%s\n", secret_key) < 0;
    bad = (file != NULL && fclose(file) != 0) || bad;
    sodium_memzero(secret_key, sizeof(secret_key));
    if (bad) {
        (void)fprintf(stderr, "tandemctl: %s: %s\n", path, strerror(errno));
        return 1;
    }
    (void)printf("%s\n", public_key);
    return 0;
}

/* The router keeps its hash alone: what is printed first is shown once. */
static int make_api_key(const char *name)
{
    uint8_t random[API_KEY_BYTES];
    uint8_t hash[crypto_generichash_BYTES];
    char text[API_KEY_BYTES * 2] = API_KEY_PREFIX;
    char hex[2 * crypto_generichash_BYTES + 1];

    if (!rtr_tenant_name_is_valid(name)) {
        return usage("apikey: a name of " RTR_TENANT_NAME_EXPECTED " is expected, not ", name);
    }
    randombytes_buf(random, sizeof(random));
    (void)sodium_bin2base64(text + sizeof(API_KEY_PREFIX) - 1,
                            sizeof(text) - sizeof(API_KEY_PREFIX) + 1, random, sizeof(random),
                            sodium_base64_VARIANT_URLSAFE_NO_PADDING);
    (void)crypto_generichash(hash, sizeof(hash), (const uint8_t *)text, strlen(text), NULL, 0);
    (void)printf("%s\n" RTR_KEY_HASH_PREFIX "%s name=%s\n", text,
                 sodium_bin2hex(hex, sizeof(hex), hash, sizeof(hash)), name);
    sodium_memzero(text, sizeof(text));
    sodium_memzero(random, sizeof(random));
    return 0;
}

/* The first line of a file in the keys' folder. */
static bool read_line(const char *folder, const char *name, char *out, size_t room)
{
    char path[1024];
    FILE *file = NULL;
    bool got = false;

    if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path)) {
        return false;
    }
    file = fopen(path, "re");
    if (file == NULL) {
        (void)fprintf(stderr, "tandemctl: %s: %s\n", path, strerror(errno));
        return false;
    }
    got = fgets(out, (int)room, file) != NULL;
    (void)fclose(file);
    if (got) {
        out[strcspn(out, "\r\n")] = '\0';
    } else {
        (void)fprintf(stderr, "tandemctl: %s: a line of text is expected\n", path);
    }
    return got;
}

static void *connect_router(const options_t *o, void *context)
{
    char router_public[Z85_CHARS + 3];
    char secret[Z85_CHARS + 3];
    char public_key[Z85_CHARS + 1];
    char endpoint[256];
    const int zero = 0;
    void *socket = NULL;

    if (!read_line(o->keys, "router.pub", router_public, sizeof(router_public)) ||
        !read_line(o->keys, "admin.key", secret, sizeof(secret)) ||
        (o->router == NULL && !read_line(o->keys, "endpoint", endpoint, sizeof(endpoint)))) {
        return NULL;
    }
    socket = zmq_socket(context, ZMQ_DEALER);
    if (socket == NULL || zmq_curve_public(public_key, secret) != 0 ||
        zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof(zero)) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, router_public, Z85_CHARS + 1) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, public_key, Z85_CHARS + 1) != 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, secret, Z85_CHARS + 1) != 0) {
        (void)fprintf(stderr,
                      "tandemctl: %s: keys in Z85 are expected in router.pub and admin.key\n",
                      o->keys);
    } else if (zmq_connect(socket, o->router != NULL ? o->router : endpoint) != 0) {
        (void)fprintf(stderr, "tandemctl: %s: %s\n", o->router != NULL ? o->router : endpoint,
                      zmq_strerror(zmq_errno()));
    } else {
        sodium_memzero(secret, sizeof(secret));
        return socket;
    }
    sodium_memzero(secret, sizeof(secret));
    if (socket != NULL) {
        (void)zmq_close(socket);
    }
    return NULL;
}

/* --- asking ----------------------------------------------------------------------------------- */

static bool send_request(void *socket, const ctl_request_t *r)
{
    size_t len = 0;
    uint8_t *bytes = ctl_encode(r, 1, &len);
    const bool sent = bytes != NULL && zmq_send(socket, bytes, len, 0) >= 0;

    free(bytes);
    return sent;
}

/* Waits for a reply, -1: for ever, and shows it. False: none came. */
static bool show_reply(void *socket, const options_t *o, int wait_ms, ctl_shown_t *out)
{
    zmq_msg_t reply;
    bool got = false;

    if (zmq_setsockopt(socket, ZMQ_RCVTIMEO, &wait_ms, sizeof(wait_ms)) != 0 ||
        zmq_msg_init(&reply) != 0) {
        return false;
    }
    got = zmq_msg_recv(&reply, socket, 0) >= 0;
    if (got) {
        *out = ctl_show(zmq_msg_data(&reply), zmq_msg_size(&reply), o->json, stdout, stderr);
    }
    (void)zmq_msg_close(&reply);
    return got;
}

static int no_answer(void)
{
    (void)fprintf(stderr,
                  "tandemctl: no answer within %d s: is the router up, and is this key in "
                  "its file `allow`?\n",
                  ANSWER_MS / 1000);
    return NO_ANSWER;
}

/* Goes on behind the last event that was shown. The router forgets a subscription that isn't
 * renewed, and one of a router that begins anew is made again. */
static int follow(void *socket, options_t *o)
{
    for (;;) {
        ctl_shown_t shown = {0};
        const int wait_ms = (int)LEASE_MS / 2;
        if (!send_request(socket, &o->request) || !show_reply(socket, o, ANSWER_MS, &shown)) {
            return no_answer();
        }
        do {
            if (shown.exit_code != 0) {
                return shown.exit_code;
            }
            o->request.since = shown.newest > 0 ? shown.newest + 1 : o->request.since;
            shown = (ctl_shown_t){0};
        } while (show_reply(socket, o, wait_ms, &shown));
    }
}

static int ask(void *socket, options_t *o)
{
    for (;;) {
        ctl_shown_t shown = {0};
        struct timespec pause = {.tv_sec = (time_t)o->watch_s,
                                 .tv_nsec =
                                     (long)(1e9 * (o->watch_s - (double)(time_t)o->watch_s))};
        if (o->watch_s > 0 && !o->json && isatty(STDOUT_FILENO)) {
            (void)fputs("\033[H\033[2J", stdout);
        }
        if (!send_request(socket, &o->request) || !show_reply(socket, o, ANSWER_MS, &shown)) {
            return no_answer();
        }
        if (o->watch_s == 0 || shown.exit_code != 0) {
            return shown.exit_code;
        }
        (void)fflush(stdout);
        (void)nanosleep(&pause, NULL);
    }
}

int main(int argc, char **argv)
{
    options_t o = {0};
    void *context = NULL;
    void *socket = NULL;
    int rc = read_command_line(&o, argc, argv);

    if (rc >= 0) {
        return rc;
    }
    if (sodium_init() < 0) {
        return 1;
    }
    if (o.request.command == CTL_KEYGEN || o.request.command == CTL_APIKEY) {
        return o.request.command == CTL_KEYGEN ? make_key(o.request.node)
                                               : make_api_key(o.request.node);
    }
    context = zmq_ctx_new();
    socket = context == NULL ? NULL : connect_router(&o, context);
    rc = 1;
    if (socket != NULL) {
        rc = o.follow && o.request.command == CTL_EVENTS ? follow(socket, &o) : ask(socket, &o);
        (void)zmq_close(socket);
    }
    if (context != NULL) {
        (void)zmq_ctx_term(context);
    }
    return rc;
}
