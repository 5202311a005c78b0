/* Events: a place in a stream's work. External ones are flags that captured graphs wait for and reset. */
#include "emulation.h"

struct event {
    struct stream *stream;  /* where it was last recorded, or NULL */
    uint64_t position;      /* pieces of that stream's work before it */
    struct graph *capture;  /* the graph in which it was recorded, or NULL */
    int num_queries;
    bool is_external, is_set;
};

static bool is_complete(const struct event *event) {
    return !event->stream ||
           __atomic_load_n(&event->stream->executed, __ATOMIC_ACQUIRE) >= event->position;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    struct event *event = calloc(1, sizeof *event);
    event->is_external = flag & ACL_EVENT_EXTERNAL;
    *handle = event;
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
    return aclrtCreateEventExWithFlag(handle, flag);
}
aclError aclrtCreateEvent(aclrtEvent *handle) { return aclrtCreateEventExWithFlag(handle, 0); }

/* Waits hold the place, not the event; graphs hold external ones. */
aclError aclrtDestroyEvent(aclrtEvent handle) {
    struct event *event = handle;
    if (!event->is_external) free(event);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    struct event *event = handle;
    struct stream *stream = stream_of(stream_handle);
    event->num_queries = 0;
    event->capture = stream->capture;
    if (event->is_external) {
        struct work work = new_work(SET_EXTERNAL);
        work.event = event;
        issue(stream, work);
    }
    event->stream = event->capture ? NULL : stream;
    event->position = stream->issued;
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    struct event *event = handle;
    struct stream *stream = stream_of(stream_handle);
    if (event->is_external) {
        struct work work = new_work(WAIT_EXTERNAL);
        work.event = event;
        issue(stream, work);
    } else if (event->capture) {
        stream->capture = event->capture;  /* the stream joins the capture */
    } else if (!is_complete(event) && event->stream != stream) {
        struct work work = new_work(WAIT);
        work.stream = event->stream, work.position = event->position;
        issue(stream, work);
    }
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream_handle) {
    struct event *event = handle;
    if (event->is_external) {
        struct work work = new_work(RESET_EXTERNAL);
        work.event = event;
        issue(stream_of(stream_handle), work);
    }
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    struct event *event = handle;
    if (event->capture) return ACL_ERROR_RT_EVENT_CAPTURED;
    count(COUNT_event_syncs);
    if (event->stream) wait_until(event->stream, event->position);
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout) {
    return aclrtSynchronizeEvent(handle);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    struct event *event = handle;
    if (event->capture) return ACL_ERROR_RT_EVENT_CAPTURED;
    if (!is_complete(event) && ++event->num_queries < PATIENCE) {
        *status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
        return ACL_SUCCESS;
    }
    if (event->stream) wait_until(event->stream, event->position);
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    *status = is_complete(handle) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

/* The emulator has no clock. */
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    *milliseconds = 0;
    return ACL_SUCCESS;
}

void set_external(struct event *event) { event->is_set = true; }
void reset_external(struct event *event) { event->is_set = false; }

void wait_external(struct event *event) {
    if (!event->is_set && event->stream) run_stream(event->stream, event->position);
    if (!event->is_set) {
        fail("a replayed graph waits for an external event that nothing has recorded since it was reset: "
             "on a device it would hang; call NPUGraph.update before each replay and wait for the replay "
             "before the next update.");
    }
}
