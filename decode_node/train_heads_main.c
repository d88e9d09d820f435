/* tandem-train-heads: makes heads for the drafter medusa out of what a model itself generates. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_config.h"
#include "common/base/td_log.h"
#include "decode_node/train_heads.h"

#define BLOCK_TOKENS 16u
#define BAR_CELLS 24u
#define BAR_NS (TD_NS_PER_S / 4)         /* between two pictures of it, on a terminal */
#define LINE_NS (10 * TD_NS_PER_S)       /* between two lines, elsewhere */
#define CHECKPOINT_NS (60 * TD_NS_PER_S) /* between two states of a training */
#define NAME_BYTES 256u

static const td_option_t options[] = {
    {"model", TD_OPTION_TEXT, NULL, "GGUF file (required)"},
    {"out", TD_OPTION_TEXT, NULL,
     "file of the heads (required); beside it OUT.data and OUT.state, from which a training that "
     "was broken off goes on"},
    {"seed", TD_OPTION_COUNT, "1", "of prompts, sampling, first weights and batches"},
    {"tokens", TD_OPTION_COUNT, "131072", "to generate and train on", 1024, 1u << 26},
    {"held-out-tokens", TD_OPTION_COUNT, "8192", "greedy, of other prompts, to measure on", 256,
     1u << 24},
    {"text-tokens", TD_OPTION_COUNT, "192", "of one text", 64, 1024},
    {"sequences", TD_OPTION_COUNT, "64", "texts at once", 1, 256},
    {"epochs", TD_OPTION_COUNT, "6", "times that the tokens are trained on", 1, 1000},
    {"steps", TD_OPTION_COUNT, "4", "drafts of a chain that are trained", 1, TRAIN_STEPS_MAX},
    {"hidden", TD_OPTION_COUNT, "1024", "width of the network, a multiple of 32", 32, 16384},
    {"shortlist", TD_OPTION_COUNT, "8192", "tokens that can be drafted, a multiple of 16", 16,
     1u << 20},
    {"candidates", TD_OPTION_COUNT, "2048", "of them, those that a batch's loss sees", 16,
     1u << 20},
    {"batch", TD_OPTION_COUNT, "256", "positions of a batch, a multiple of 16", 16, 1u << 16},
    {"rate", TD_OPTION_COUNT, "1000", "millionths; of Adam, at first", 1, 1000000},
    {"precision", TD_OPTION_CHOICE, "mixed", "of the model, as its nodes have it", 0, 0,
     "fast|mixed|exact"},
    {"threads", TD_OPTION_COUNT, "0", "0 = as many as there are CPUs", 0, TD_THREADS_MAX},
    {"log-level", TD_OPTION_CHOICE, "info", "lowest level logged", 0, 0, "error|warn|info|debug"},
};

typedef struct trainer {
    td_config_t *config;
    td_gguf_t *gguf;
    td_model_t *model;
    train_options_t o;
    train_data_t data;
    train_data_t held_out;
    train_net_t *net;
    char data_path[PATH_MAX];
    char held_out_path[PATH_MAX];
    char state_path[PATH_MAX];
} trainer_t;

/* --- progress --------------------------------------------------------------------------------- */

static uint64_t began_ns;
static uint64_t said_ns;

static void begin_progress(void)
{
    began_ns = td_now_ns();
    said_ns = 0;
}

/* A bar that stands still on a terminal; elsewhere a line now and then. The last one always. */
static void say(const char *what, uint64_t done, uint64_t all, const char *more)
{
    const bool terminal = isatty(STDERR_FILENO) == 1;
    const uint64_t now_ns = td_now_ns();
    const double part = all == 0 ? 1 : (double)done / (double)all;
    const double took_s = (double)(now_ns - began_ns) / (double)TD_NS_PER_S;
    char bar[BAR_CELLS + 1];

    if (done < all && now_ns - said_ns < (terminal ? BAR_NS : LINE_NS)) {
        return;
    }
    said_ns = now_ns;
    for (uint32_t i = 0; i < BAR_CELLS; i++) {
        bar[i] = (double)i < part * BAR_CELLS ? '#' : '.';
    }
    bar[BAR_CELLS] = '\0';
    (void)fprintf(stderr, "%s%-10s [%s] %3.0f %%  %.0f s, %.0f s to go  %s%s",
                  terminal ? "\r\033[K" : "", what, bar, 100 * part, took_s,
                  part > 0 ? took_s * (1 - part) / part : 0, more,
                  terminal && done < all ? "" : "\n");
}

static void say_generated(uint32_t rows, uint32_t rows_max)
{
    say("generating", rows, rows_max, "");
}

static void print_score(const trainer_t *t, const train_score_t *s)
{
    double tokens = 1; /* that a step brings: the model's own, and drafts while they are right */
    double reached = 1;

    (void)printf("%" PRIu64 " held-out positions\n%-6s %10s %22s\n", s->rows, "draft", "accepted",
                 "with given tokens");
    for (uint32_t i = 0; i < t->o.steps; i++) {
        const double accepted = (double)s->right[i] / (double)TD_MAX(s->alive[i], 1u);
        reached *= accepted;
        tokens += reached;
        (void)printf("%-6u %9.1f%% %21.1f%%\n", i + 1, 100 * accepted,
                     100 * (double)s->any[i] / (double)TD_MAX(s->rows, 1u));
    }
    (void)printf("tokens a step with %u drafts: %.2f\n", t->o.steps, tokens);
}

/* --- start ------------------------------------------------------------------------------------ */

static uint32_t count_of(const trainer_t *t, const char *name)
{
    return (uint32_t)td_config_u64(t->config, name);
}

static td_status_t read_options(trainer_t *t)
{
    const char *out = td_config_text(t->config, "out");
    train_options_t *o = &t->o;
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);

    o->steps = count_of(t, "steps");
    o->hidden_dim = count_of(t, "hidden");
    o->shortlist = count_of(t, "shortlist");
    o->candidates = count_of(t, "candidates");
    o->batch = count_of(t, "batch");
    o->threads = count_of(t, "threads");
    o->seed = td_config_u64(t->config, "seed");
    o->learning_rate = (double)td_config_u64(t->config, "rate") / 1e6;
    if (o->threads == 0) {
        o->threads = (uint32_t)TD_MAX(1, TD_MIN(cpus, (long)TD_THREADS_MAX));
    }
    if (td_config_text(t->config, "model") == NULL || out == NULL) {
        TD_LOG_ERROR("option missing", "needed=\"--model and --out\"");
        return TD_ERR_INVALID;
    }
    if (o->hidden_dim % 32 != 0 || o->shortlist % 16 != 0 || o->candidates % 16 != 0 ||
        o->batch % TRAIN_RUN != 0) {
        TD_LOG_ERROR("option out of range",
                     "expected=\"--hidden a multiple of 32; --shortlist, --candidates and --batch "
                     "of 16\"");
        return TD_ERR_INVALID;
    }
    if (snprintf(t->data_path, sizeof(t->data_path), "%s.data", out) >= PATH_MAX ||
        snprintf(t->held_out_path, sizeof(t->held_out_path), "%s.held-out", out) >= PATH_MAX ||
        snprintf(t->state_path, sizeof(t->state_path), "%s.state", out) >= PATH_MAX) {
        TD_LOG_ERROR("path too long", "bytes_max=%d", PATH_MAX);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

static td_status_t load_model(trainer_t *t)
{
    td_model_options_t options_of = {.threads = t->o.threads,
                                     .rows_max = 256,
                                     .logit_rows_max = 256,
                                     .block_tokens = BLOCK_TOKENS,
                                     .kv_codec = TD_KV_F16};

    TD_TRY(td_precision_parse(td_config_text(t->config, "precision"), &options_of.precision));
    TD_TRY(td_gguf_open(td_config_text(t->config, "model"), &t->gguf));
    return td_model_load(t->gguf, &options_of, &t->model);
}

/* --- what the model generates ----------------------------------------------------------------- */

/* What data depend on: others are not taken up again. */
static void name_data(const trainer_t *t, bool held_out, char name[NAME_BYTES])
{
    const td_model_info_t *info = td_model_info(t->model);
    int len = snprintf(
        name, NAME_BYTES, "%s seed %" PRIu64 " tokens %u text %u sequences %u model ",
        info->numerics_class, t->o.seed, count_of(t, held_out ? "held-out-tokens" : "tokens"),
        count_of(t, "text-tokens"), count_of(t, "sequences"));

    for (uint32_t i = 0; i < sizeof(info->fingerprint); i++) {
        len += snprintf(name + len, NAME_BYTES - (size_t)len, "%02x", info->fingerprint[i]);
    }
}

static td_status_t make_data(trainer_t *t, bool held_out, const char *path, train_data_t *out)
{
    const train_source_t source = {.gguf = t->gguf,
                                   .model = t->model,
                                   .sequences = count_of(t, "sequences"),
                                   .tokens_max = count_of(t, "text-tokens"),
                                   .seed = t->o.seed,
                                   .progress = say_generated};
    char name[NAME_BYTES];
    td_status_t status = TD_OK;

    name_data(t, held_out, name);
    status = train_data_load(path, name, td_model_info(t->model)->embed_dim, out);
    if (status == TD_OK) {
        TD_LOG_INFO("data read again", "file=%s rows=%u", path, out->rows);
        return TD_OK;
    }
    if (status != TD_ERR_NOT_FOUND) {
        return status;
    }
    begin_progress();
    TD_TRY(train_generate(&source, held_out, count_of(t, held_out ? "held-out-tokens" : "tokens"),
                          out));
    return train_data_save(path, name, out);
}

/* --- training --------------------------------------------------------------------------------- */

static void name_state(const trainer_t *t, char name[NAME_BYTES])
{
    char data[NAME_BYTES];
    const train_options_t *o = &t->o;
    const int len =
        snprintf(name, NAME_BYTES, "%u %u %u %u %u %g %" PRIu64 " of ", o->steps, o->hidden_dim,
                 o->shortlist, o->candidates, o->batch, o->learning_rate, o->batches);

    name_data(t, false, data);
    (void)snprintf(name + len, NAME_BYTES - (size_t)len, "%.*s", (int)(NAME_BYTES - 1) - len, data);
}

static void say_batch(const trainer_t *t, uint64_t done, uint64_t an_epoch,
                      const train_loss_t *loss)
{
    char more[128];
    train_score_t score;
    size_t len = (size_t)snprintf(more, sizeof(more), "loss %.3f, state %.3f", loss->distribution,
                                  loss->state);

    if (done % an_epoch == 0 || done == t->o.batches) {
        train_net_score(t->net, &t->held_out, &score);
        len += (size_t)snprintf(more + len, sizeof(more) - len, "  held out");
        for (uint32_t i = 0; i < t->o.steps; i++) {
            len +=
                (size_t)snprintf(more + len, sizeof(more) - len, " %.1f",
                                 100 * (double)score.right[i] / (double)TD_MAX(score.alive[i], 1u));
        }
        said_ns = 0; /* it is said, whenever the last line was */
        say("training", done, t->o.batches, more);
        if (isatty(STDERR_FILENO) == 1) {
            (void)fputc('\n', stderr);
        }
        return;
    }
    say("training", done, t->o.batches, more);
}

static td_status_t train(trainer_t *t)
{
    const uint64_t an_epoch = TD_MAX(t->data.rows / t->o.batch, 1u);
    uint64_t saved_ns = td_now_ns();
    uint64_t done = 0;
    train_loss_t loss = {0};
    char name[NAME_BYTES];
    td_status_t status = TD_OK;

    t->o.batches = an_epoch * count_of(t, "epochs");
    name_state(t, name);
    TD_TRY(train_net_create(t->model, &t->data, &t->o, &t->net));
    status = train_net_load(t->net, t->state_path, name, &done);
    if (status == TD_OK) {
        TD_LOG_INFO("training goes on", "file=%s batches=%" PRIu64, t->state_path, done);
    } else if (status != TD_ERR_NOT_FOUND) {
        return status;
    }
    begin_progress();
    while (done < t->o.batches) {
        train_loss_t now;
        train_net_batch(t->net, done++, &now);
        /* Of some 20 batches: one alone says little. */
        loss.distribution +=
            (loss.distribution == 0 ? 1 : 0.05) * (now.distribution - loss.distribution);
        loss.state += (loss.state == 0 ? 1 : 0.05) * (now.state - loss.state);
        say_batch(t, done, an_epoch, &loss);
        if (td_now_ns() - saved_ns > CHECKPOINT_NS) {
            TD_TRY(train_net_save(t->net, t->state_path, name, done));
            saved_ns = td_now_ns();
        }
    }
    return train_net_save(t->net, t->state_path, name, done);
}

static td_status_t make_heads(trainer_t *t)
{
    train_score_t score;

    TD_TRY(read_options(t));
    TD_TRY(load_model(t));
    TD_TRY(make_data(t, true, t->held_out_path, &t->held_out));
    TD_TRY(make_data(t, false, t->data_path, &t->data));
    TD_TRY(train(t));
    train_net_score(t->net, &t->held_out, &score);
    TD_TRY(train_net_export(t->net, td_config_text(t->config, "out"),
                            td_model_info(t->model)->fingerprint, &score));
    print_score(t, &score);
    /* What a training goes on from is of no more use. */
    (void)remove(t->state_path);
    return TD_OK;
}

int main(int argc, char **argv)
{
    static trainer_t t;
    td_log_level_t level = TD_LOG_LEVEL_INFO;
    td_config_next_t next = td_config_parse(
        "tandem-train-heads",
        "Trains heads that draft tokens for a model, on what the model itself generates.", options,
        TD_ARRAY_LEN(options), argc, argv, &t.config);
    int rc = next == TD_CONFIG_EXIT_USAGE ? 2 : 0;

    if (next == TD_CONFIG_RUN) {
        (void)!td_log_level_parse(td_config_text(t.config, "log-level"), &level);
        td_log_init("tandem-train-heads", level);
        rc = make_heads(&t) == TD_OK ? 0 : 1;
    }
    train_net_destroy(t.net);
    train_data_fini(&t.data);
    train_data_fini(&t.held_out);
    td_model_destroy(t.model);
    td_gguf_close(t.gguf);
    td_config_destroy(t.config);
    return rc;
}
