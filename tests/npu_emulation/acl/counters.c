/* Counts of the calls that torch_npu makes, and the names of what it launched. */
#include "emulation.h"

static long counters[NUM_COUNTERS];

#define MAX_LAUNCH_NAMES (1 << 20)
static const char *launch_names[MAX_LAUNCH_NAMES];
static long num_launch_names;

void count(enum counter which) { __atomic_add_fetch(&counters[which], 1, __ATOMIC_RELAXED); }

/* The name must outlive the process's use of it: a literal of the stubs, or a copy. */
void count_launch(const char *name) {
    long position = __atomic_fetch_add(&num_launch_names, 1, __ATOMIC_RELAXED);
    launch_names[position % MAX_LAUNCH_NAMES] = name;
    count(COUNT_launches);
}

const char *npu_emulation_counter_names(void) {
#define AS_TEXT(name) #name " "
    return COUNTERS(AS_TEXT);
#undef AS_TEXT
}

void npu_emulation_counters(long *values) { memcpy(values, counters, sizeof counters); }

/* The name of launch `number` of this process; only the last million are kept. */
const char *npu_emulation_launch_name(long number) { return launch_names[number % MAX_LAUNCH_NAMES]; }
