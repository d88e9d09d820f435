/* rtr_page.h - the status page: router/status_page.html, which is part of the program. It asks
 * /status for what it shows, and nothing else of anybody.
 * Threads: rtr_page_policy(): init once, then any; the rest: any. */
#pragma once

#include <stddef.h>

extern const char rtr_page_html[];
size_t rtr_page_bytes(void);
/** Content-Security-Policy of the page: its own script and style by hash, this server, no other. */
const char *rtr_page_policy(void);
