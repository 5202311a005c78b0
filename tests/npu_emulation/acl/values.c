/* Words of device memory that streams write and wait for: torch_npu's external events, by which a captured
   graph waits for the update of its lengths. */
#include "emulation.h"

aclError aclrtValueWrite(void *word, uint64_t value, uint32_t flag, aclrtStream stream) {
    struct work work = new_work(WRITE_VALUE);
    work.target = word, work.position = value;
    issue(stream_of(stream), work);
    return ACL_SUCCESS;
}

aclError aclrtValueWait(void *word, uint64_t value, uint32_t flag, aclrtStream stream) {
    struct work work = new_work(WAIT_VALUE);
    work.target = word, work.position = value, work.value = (int)flag;
    issue(stream_of(stream), work);
    return ACL_SUCCESS;
}

void write_value(const struct work *work) { *(uint64_t *)work->target = work->position; }

static bool is_reached(const struct work *work) {
    uint64_t word = *(uint64_t *)work->target, value = work->position;
    switch (work->value) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return (int64_t)(word - value) >= 0;
    case ACL_STREAM_WAIT_VALUE_EQ: return word == value;
    case ACL_STREAM_WAIT_VALUE_AND: return (word & value) != 0;
    default: return ~(word | value) != 0;
    }
}

void wait_value(const struct work *work) {
    while (!is_reached(work)) {
        if (!run_to_write_of(work->target)) {
            fail("a stream waits for an external event that nothing has recorded since it was reset: a "
                 "device would hang. Call NPUGraph.update before a replay is waited for, and wait for the "
                 "replay before the next update.");
        }
    }
}
