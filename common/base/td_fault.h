/* td_fault.h - named steps at which a test build kills or freezes itself, or one of its threads
 * hangs for ever (--fault STEP:kill|stop|hang[:N]). N counts passes of the step, 1 = the first.
 * Release builds have no fault points. Threads: td_fault_init: init; td_fault_point: any. */
#pragma once

#include "common/base/td_status.h"

/** Errors: TD_ERR_INVALID (not STEP:kill|stop|hang[:N]), TD_ERR_UNSUPPORTED (a release build).
 * NULL and "" switch faults off. */
TD_MUST_CHECK td_status_t td_fault_init(const char *spec);

#ifdef TD_TEST_BUILD
void td_fault_point(const char *step);
#define TD_FAULT_POINT(step) td_fault_point(step)
#else
#define TD_FAULT_POINT(step) ((void)0)
#endif
