#include "router/rtr_tls.h"

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_file.h"
#include "common/base/td_log.h"

#define CHAIN_MAX 8u
#define FILE_BYTES_MAX (1u << 20)
#define LOOK_MS 1000u
#define RETIRED_MS 120000u /* an old pair is kept past the end of its handshakes */

typedef struct pair {
    struct pair *next; /* older */
    gnutls_pcert_st chain[CHAIN_MAX];
    unsigned int count;
    gnutls_privkey_t key;
    uint64_t retired_ns; /* 0: in use */
} pair_t;

/* What a file was when it was read: another one has another of these. */
typedef struct stamp {
    struct timespec mtime;
    ino_t inode;
    off_t size;
} stamp_t;

struct rtr_tls {
    const char *cert_file;
    const char *key_file;
    uint32_t handshake_ms;
    stamp_t cert_stamp;
    stamp_t key_stamp;
    uint64_t next_look_ns;
    pthread_mutex_t mu; /* guards the first pair; a leaf */
    pair_t *pairs;      /* owned; the one in use first */
};

static rtr_tls_t *the_tls; /* set before MHD starts, cleared after it ended */

/* --- files ------------------------------------------------------------------------------------ */

static stamp_t stamp_of(const struct stat *st)
{
    return (stamp_t){.mtime = st->st_mtim, .inode = st->st_ino, .size = st->st_size};
}

static bool stamp_differs(const stamp_t *a, const stamp_t *b)
{
    return a->mtime.tv_sec != b->mtime.tv_sec || a->mtime.tv_nsec != b->mtime.tv_nsec ||
           a->inode != b->inode || a->size != b->size;
}

static td_status_t read_file(const char *path, bool is_secret, gnutls_datum_t *out, stamp_t *stamp)
{
    struct stat st;
    int fd = -1;
    ssize_t got = -1;

    TD_TRY(td_file_open("TLS", path, is_secret, &fd, &st));
    if (st.st_size <= 0 || st.st_size > FILE_BYTES_MAX) {
        TD_LOG_ERROR("file refused", "what=TLS file=%s expected=\"up to 1 MiB of PEM\"", path);
        (void)close(fd);
        return TD_ERR_INVALID;
    }
    out->data = td_calloc(1, (size_t)st.st_size + 1);
    got = out->data == NULL ? -1 : read(fd, out->data, (size_t)st.st_size);
    (void)close(fd);
    if (got != st.st_size) { /* it is being written */
        td_free(out->data);
        out->data = NULL;
        return got < 0 ? TD_ERR_NO_MEMORY : TD_ERR_IO;
    }
    out->size = (unsigned int)got;
    *stamp = stamp_of(&st);
    return TD_OK;
}

/* --- a pair ----------------------------------------------------------------------------------- */

static void pair_free(pair_t *pair)
{
    for (unsigned int i = 0; i < pair->count; i++) {
        gnutls_pcert_deinit(&pair->chain[i]);
    }
    if (pair->key != NULL) {
        gnutls_privkey_deinit(pair->key);
    }
    td_free(pair);
}

/* Does the key belong to the certificate? GnuTLS says so where it is given both. */
static int check_pair(const gnutls_datum_t *cert, const gnutls_datum_t *key)
{
    gnutls_certificate_credentials_t both = NULL;
    int bad = gnutls_certificate_allocate_credentials(&both);

    if (bad == 0) {
        bad = gnutls_certificate_set_x509_key_mem(both, cert, key, GNUTLS_X509_FMT_PEM);
        gnutls_certificate_free_credentials(both);
    }
    return bad < 0 ? bad : 0;
}

static td_status_t make_pair(rtr_tls_t *tls, const gnutls_datum_t *cert, const gnutls_datum_t *key,
                             pair_t **out)
{
    pair_t *pair = td_calloc(1, sizeof(*pair));
    unsigned int count = CHAIN_MAX;
    int bad = 0;

    if (pair == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    bad = check_pair(cert, key);
    if (bad == 0) {
        bad = gnutls_pcert_list_import_x509_raw(pair->chain, &count, cert, GNUTLS_X509_FMT_PEM, 0);
    }
    if (bad == 0) {
        pair->count = count;
        bad = gnutls_privkey_init(&pair->key);
    }
    if (bad == 0) {
        bad = gnutls_privkey_import_x509_raw(pair->key, key, GNUTLS_X509_FMT_PEM, NULL, 0);
    }
    if (bad != 0) {
        TD_LOG_ERROR("TLS certificate refused", "cert=%s key=%s err=\"%s\"", tls->cert_file,
                     tls->key_file, gnutls_strerror(bad));
        pair_free(pair);
        return TD_ERR_INVALID;
    }
    *out = pair;
    return TD_OK;
}

static td_status_t load(rtr_tls_t *tls)
{
    gnutls_datum_t cert = {0};
    gnutls_datum_t key = {0};
    pair_t *pair = NULL;
    td_status_t status = read_file(tls->cert_file, false, &cert, &tls->cert_stamp);

    if (status == TD_OK) {
        status = read_file(tls->key_file, true, &key, &tls->key_stamp);
    }
    if (status == TD_OK) {
        status = make_pair(tls, &cert, &key, &pair);
    }
    if (key.data != NULL) {
        gnutls_memset(key.data, 0, key.size);
    }
    td_free(key.data);
    td_free(cert.data);
    if (status != TD_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&tls->mu);
    pair->next = tls->pairs;
    if (pair->next != NULL) {
        pair->next->retired_ns = td_now_ns();
    }
    tls->pairs = pair;
    (void)pthread_mutex_unlock(&tls->mu);
    return TD_OK;
}

/* --- for the server --------------------------------------------------------------------------- */

static int give_pair(gnutls_session_t session, const gnutls_datum_t *names, int name_count,
                     const gnutls_pk_algorithm_t *algorithms, int algorithm_count,
                     gnutls_pcert_st **chain, unsigned int *count, gnutls_privkey_t *key)
{
    rtr_tls_t *tls = the_tls;
    (void)session;
    (void)names;
    (void)name_count;
    (void)algorithms;
    (void)algorithm_count;

    (void)pthread_mutex_lock(&tls->mu);
    *chain = tls->pairs->chain;
    *count = tls->pairs->count;
    *key = tls->pairs->key;
    (void)pthread_mutex_unlock(&tls->mu);
    return 0;
}

void *rtr_tls_callback(void)
{
    gnutls_certificate_retrieve_function2 *const callback = give_pair;
    void *out = NULL;

    _Static_assert(sizeof(callback) == sizeof(out), "POSIX: function pointers fit");
    memcpy(&out, &callback, sizeof(out));
    return out;
}

static void free_retired(rtr_tls_t *tls, uint64_t now_ns)
{
    const uint64_t kept_ns = ((uint64_t)RETIRED_MS + tls->handshake_ms) * TD_NS_PER_MS;
    pair_t *kept = tls->pairs; /* only this thread changes what is behind the first */

    while (kept != NULL && kept->next != NULL) {
        pair_t *old = kept->next;
        if (now_ns - TD_MIN(old->retired_ns, now_ns) > kept_ns) {
            kept->next = old->next;
            pair_free(old);
        } else {
            kept = old;
        }
    }
}

void rtr_tls_tick(rtr_tls_t *tls, uint64_t now_ns)
{
    struct stat cert;
    struct stat key;
    stamp_t cert_now;
    stamp_t key_now;

    if (tls == NULL || now_ns < tls->next_look_ns) {
        return;
    }
    tls->next_look_ns = now_ns + LOOK_MS * TD_NS_PER_MS;
    free_retired(tls, now_ns);
    if (stat(tls->cert_file, &cert) != 0 || stat(tls->key_file, &key) != 0) {
        return; /* between two files, as renewals have it */
    }
    cert_now = stamp_of(&cert);
    key_now = stamp_of(&key);
    if (!stamp_differs(&cert_now, &tls->cert_stamp) && !stamp_differs(&key_now, &tls->key_stamp)) {
        return;
    }
    /* Tried once for each state of the files: one that is no good is told once. */
    tls->cert_stamp = cert_now;
    tls->key_stamp = key_now;
    if (load(tls) == TD_OK) {
        TD_LOG_INFO("TLS certificate renewed", "cert=%s", tls->cert_file);
    } else {
        TD_LOG_WARN("the TLS certificate in use stays", "cert=%s", tls->cert_file);
    }
}

td_status_t rtr_tls_open(const char *cert_file, const char *key_file, uint32_t handshake_ms,
                         rtr_tls_t **out)
{
    rtr_tls_t *tls = td_calloc(1, sizeof(*tls));
    td_status_t status = TD_OK;

    if (tls == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    tls->cert_file = cert_file;
    tls->key_file = key_file;
    tls->handshake_ms = handshake_ms;
    (void)pthread_mutex_init(&tls->mu, NULL);
    status = load(tls);
    if (status != TD_OK) {
        rtr_tls_close(tls);
        return status;
    }
    the_tls = tls;
    *out = tls;
    return TD_OK;
}

void rtr_tls_close(rtr_tls_t *tls)
{
    if (tls == NULL) {
        return;
    }
    the_tls = NULL;
    while (tls->pairs != NULL) {
        pair_t *pair = tls->pairs;
        tls->pairs = pair->next;
        pair_free(pair);
    }
    (void)pthread_mutex_destroy(&tls->mu);
    td_free(tls);
}
