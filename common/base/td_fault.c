#include "common/base/td_fault.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_log.h"

#ifdef TD_TEST_BUILD

#define FAULT_HANG (-1) /* the thread that passes never goes on; the others do */

static char fault_step[64];
static int fault_signal;
static atomic_int fault_countdown; /* relaxed: which thread's pass counts last does not matter */

td_status_t td_fault_init(const char *spec)
{
    char action[8] = "";
    int nth = 1;
    if (spec == NULL || spec[0] == '\0') {
        return TD_OK;
    }
    if (sscanf(spec, "%63[a-z_]:%7[a-z]:%d", fault_step, action, &nth) < 2 || nth < 1) {
        return TD_ERR_INVALID;
    }
    if (strcmp(action, "kill") == 0) {
        fault_signal = SIGKILL;
    } else if (strcmp(action, "stop") == 0) {
        fault_signal = SIGSTOP;
    } else if (strcmp(action, "hang") == 0) {
        fault_signal = FAULT_HANG;
    } else {
        return TD_ERR_INVALID;
    }
    atomic_store_explicit(&fault_countdown, nth, memory_order_relaxed);
    return TD_OK;
}

void td_fault_point(const char *step)
{
    if (fault_signal == 0 || strcmp(step, fault_step) != 0) {
        return;
    }
    if (atomic_fetch_sub_explicit(&fault_countdown, 1, memory_order_relaxed) == 1) {
        TD_LOG_WARN("fault injected", "step=%s signal=%d", step, fault_signal);
        if (fault_signal != FAULT_HANG) {
            (void)kill(getpid(), fault_signal);
            return;
        }
        for (;;) {
            (void)pause();
        }
    }
}

#else

td_status_t td_fault_init(const char *spec)
{
    return spec == NULL || spec[0] == '\0' ? TD_OK : TD_ERR_UNSUPPORTED;
}

#endif
