#include "router/rtr_page.h"

#include <pthread.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

/* The assembler takes a file as it is, with a zero behind it; the Makefile knows that this object
 * depends on it. */
#define PART_OF_PROGRAM(name, path)                                                                \
    __asm__(".section .rodata\n"                                                                   \
            ".global " name "\n"                                                                   \
            ".type " name ", @object\n" name ":\n"                                                 \
            ".incbin \"" path "\"\n"                                                               \
            ".L" name "_end:\n"                                                                    \
            ".byte 0\n"                                                                            \
            ".size " name ", . - " name "\n"                                                       \
            ".balign 8\n"                                                                          \
            ".global " name "_len\n"                                                               \
            ".type " name "_len, @object\n" name "_len:\n"                                         \
            ".quad .L" name "_end - " name "\n"                                                    \
            ".size " name "_len, 8\n"                                                              \
            ".previous\n")

PART_OF_PROGRAM("rtr_page_html", "router/status_page.html");
PART_OF_PROGRAM("rtr_page_openapi", "router/openapi.json");
extern const unsigned long rtr_page_html_len;
extern const unsigned long rtr_page_openapi_len;

#define HASH_TEXT_BYTES 64u

static char policy[512];
static pthread_once_t policy_once = PTHREAD_ONCE_INIT;

size_t rtr_page_bytes(void)
{
    return rtr_page_html_len;
}

size_t rtr_page_openapi_bytes(void)
{
    return rtr_page_openapi_len;
}

/* 'sha256-...' of what stands between two tags, once. */
static void hash_between(const char *open, const char *close, char out[HASH_TEXT_BYTES])
{
    const char *from = strstr(rtr_page_html, open);
    const char *to = from == NULL ? NULL : strstr(from, close);
    uint8_t hash[crypto_hash_sha256_BYTES];

    out[0] = '\0';
    if (to != NULL) {
        from += strlen(open);
        (void)crypto_hash_sha256(hash, (const uint8_t *)from, (size_t)(to - from));
        (void)sodium_bin2base64(out, HASH_TEXT_BYTES, hash, sizeof(hash),
                                sodium_base64_VARIANT_ORIGINAL);
    }
}

static void make_policy(void)
{
    char script[HASH_TEXT_BYTES];
    char style[HASH_TEXT_BYTES];

    hash_between("<script>", "</script>", script);
    hash_between("<style>", "</style>", style);
    (void)snprintf(policy, sizeof(policy),
                   "default-src 'none'; script-src 'sha256-%s'; style-src 'sha256-%s'; connect-src "
                   "'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors "
                   "'none'",
                   script, style);
}

const char *rtr_page_policy(void)
{
    (void)pthread_once(&policy_once, make_policy);
    return policy;
}
