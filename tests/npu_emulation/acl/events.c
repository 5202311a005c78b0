/* Events: places in a stream's work, which the host and other streams wait for. */
#include "emulation.h"

struct event {
    struct stream *stream;  /* where it was last recorded, or NULL */
    uint64_t position;      /* pieces of that stream's work before it */
    struct graph *capture;  /* the graph in which it was recorded, or NULL */
    int num_queries;
};

static bool is_complete(const struct event *event) {
    return !event->stream ||
           __atomic_load_n(&event->stream->executed, __ATOMIC_ACQUIRE) >= event->position;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    *handle = calloc(1, sizeof(struct event));
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
    return aclrtCreateEventExWithFlag(handle, flag);
}
aclError aclrtCreateEvent(aclrtEvent *handle) { return aclrtCreateEventExWithFlag(handle, 0); }

/* Waits hold the place, not the event. */
aclError aclrtDestroyEvent(aclrtEvent handle) {
    free(handle);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    struct event *event = handle;
    struct stream *stream = stream_of(stream_handle);
    event->num_queries = 0;
    event->capture = stream->capture;
    event->stream = event->capture ? NULL : stream;
    event->position = stream->issued;
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    struct event *event = handle;
    struct stream *stream = stream_of(stream_handle);
    if (event->capture) {
        stream->capture = event->capture;  /* the stream joins the capture */
    } else if (!is_complete(event) && event->stream != stream) {
        struct work work = new_work(WAIT);
        work.stream = event->stream, work.position = event->position;
        issue(stream, work);
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

/* When the work before it was done; that is, when the host waited for it. */
static double moment_of(const struct event *event) {
    return event->stream ? event->stream->done[event->position % REMEMBERED] : 0;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    *milliseconds = 1e3 * (moment_of(end) - moment_of(start));
    return ACL_SUCCESS;
}
