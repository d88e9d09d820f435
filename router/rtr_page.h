/* rtr_page.h - files that are part of the program: the status page (router/status_page.html), which
 * asks /status for what it shows, and nothing else of anybody; and the description of the API
 * (router/openapi.json).
 * Threads: rtr_page_policy(): init once, then any; the rest: any. */
#pragma once

#include <stddef.h>

extern const char rtr_page_html[];
size_t rtr_page_bytes(void);
extern const char rtr_page_openapi[];
size_t rtr_page_openapi_bytes(void);
/** Content-Security-Policy of the page: its own script and style by hash, this server, no other. */
const char *rtr_page_policy(void);
