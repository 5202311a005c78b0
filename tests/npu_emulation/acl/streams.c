/* Streams: work queued in order, executed as late as is allowed: when something waits for it.

   A wait of the host for a stream executes that stream's work, in order, up to the point waited for, and of
   other streams what an event wait among that work needs; everything else stays queued. So a missing wait,
   of the host or between two streams, is a read of what is not there yet, at once and every time. */
#include <pthread.h>
#include <time.h>

#include "emulation.h"

static struct stream default_stream;
static struct stream *all_streams = &default_stream;
static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t device; /* held while work executes; always taken before `queues` */
static long num_pending;
static struct work *late_copies; /* whose turn has come; with the device's lock held */

__attribute__((constructor)) static void make_device_lock(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&device, &attributes);
}

void lock_queues(void) { pthread_mutex_lock(&queues); }
void unlock_queues(void) { pthread_mutex_unlock(&queues); }

void fail(const char *sentence) {
    fprintf(stderr, "npu emulation: %s\n", sentence);
    abort();
}

struct stream *stream_of(aclrtStream handle) { return handle ? handle : &default_stream; }

struct work new_work(enum work_kind kind) {
    struct work work;
    memset(&work, 0, sizeof work);
    work.kind = kind;
    return work;
}

bool anything_pending(void) { return __atomic_load_n(&num_pending, __ATOMIC_ACQUIRE) != 0; }
long npu_emulation_num_pending(void) { return __atomic_load_n(&num_pending, __ATOMIC_ACQUIRE); }

void issue(struct stream *stream, struct work work) {
    if (stream->capture) {
        capture(stream, work);
        return;
    }
    if (work.kind == COPY) poison_target(&work);
    struct work *queued = malloc(sizeof work);
    *queued = work;
    lock_queues();
    if (stream->tail) stream->tail->next = queued; else stream->head = queued;
    stream->tail = queued;
    stream->issued++;
    __atomic_add_fetch(&num_pending, 1, __ATOMIC_ACQ_REL);
    unlock_queues();
    if (stream->runs_ahead) wait_until(stream, stream->issued);
}

void execute(struct work *work) {
    switch (work->kind) {
    case COPY: copy_now(work); break;
    case FILL: memset(work->target, work->value, work->num_bytes); break;
    case CALL: run_call(work->call, CALL_ONCE); break;
    case WAIT: run_stream(work->stream, work->position); break;
    case WRITE_VALUE: write_value(work); break;
    case WAIT_VALUE: wait_value(work); break;
    case REPLAY: replay(work->graph); break;
    case UPDATE: apply_update(work->group); break;
    case COLLECTIVE: run_collective(&work->collective); break;
    }
}

static void keep_for_later(struct work *copy) {
    struct work **place = &late_copies;
    while (*place) place = &(*place)->next;
    copy->next = NULL;
    *place = copy;
}

static void land_copies(void) {
    while (late_copies) {
        struct work *copy = late_copies;
        late_copies = copy->next;
        copy_now(copy);
        free(copy);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

void run_stream(struct stream *stream, uint64_t position) {
    while (stream->executed < position) {
        lock_queues();
        struct work *work = stream->head;
        if (!work) fail("two streams wait for each other.");
        stream->head = work->next;
        if (!stream->head) stream->tail = NULL;
        unlock_queues();
        if (work->late) {
            keep_for_later(work);
        } else {
            execute(work);
            free(work);
        }
        stream->done[(stream->executed + 1) % REMEMBERED] = now();
        __atomic_add_fetch(&stream->executed, 1, __ATOMIC_ACQ_REL);
        __atomic_sub_fetch(&num_pending, 1, __ATOMIC_ACQ_REL);
    }
}

/* Runs a stream that has such work up to the first of it; false where none has. */
static bool run_to(bool (*is_wanted)(const struct work *, const void *), const void *what) {
    struct stream *found_in = NULL;
    uint64_t position = 0;
    lock_queues();
    for (struct stream *stream = all_streams; stream && !found_in; stream = stream->next) {
        uint64_t queued = 0, found = 0;
        for (struct work *work = stream->head; work; work = work->next) {
            queued++;
            if (!found && is_wanted(work, what)) found = queued;
        }
        if (found) found_in = stream, position = stream->issued - queued + found;
    }
    unlock_queues();
    if (found_in) run_stream(found_in, position);
    return found_in != NULL;
}

static bool writes(const struct work *work, const void *word) {
    return work->kind == WRITE_VALUE && work->target == word;
}

bool run_to_write_of(const void *word) { return run_to(writes, word); }

static bool takes_part(const struct work *work, const void *communicator) {
    if (work->kind == REPLAY) return has_collective(work->graph, communicator);
    return work->kind == COLLECTIVE && work->collective.communicator == communicator;
}

/* Work may be a Python closure, which needs the interpreter's lock; who waits must not hold it. Python's
   symbols are there only once it has loaded us. */
#pragma weak PyGILState_Check
#pragma weak PyEval_SaveThread
#pragma weak PyEval_RestoreThread
int PyGILState_Check(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);

static void *start_waiting(void) {
    void *thread = PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : NULL;
    pthread_mutex_lock(&device);
    return thread;
}

static void stop_waiting(void *thread) {
    pthread_mutex_unlock(&device);
    if (thread) PyEval_RestoreThread(thread);
}

void wait_until(struct stream *stream, uint64_t position) {
    if (__atomic_load_n(&stream->executed, __ATOMIC_ACQUIRE) >= position) return;
    void *thread = start_waiting();
    run_stream(stream, position);
    land_copies();
    stop_waiting(thread);
}

void wait_for_device(void) {
    if (!anything_pending()) return;
    void *thread = start_waiting();
    for (struct stream *stream = all_streams; stream; stream = stream->next) run_stream(stream, stream->issued);
    land_copies();
    stop_waiting(thread);
}

/* Lets the device work until the communicator's collective `number` has run, if that is issued. */
void npu_emulation_run_to_collective(struct communicator *communicator, uint64_t number) {
    void *thread = start_waiting();
    if (npu_emulation_num_run(communicator) == number) run_to(takes_part, communicator);
    stop_waiting(thread);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flag) {
    struct stream *stream = calloc(1, sizeof *stream);
    lock_queues();
    stream->next = all_streams;
    all_streams = stream;
    unlock_queues();
    *handle = stream;
    return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }

/* Its work runs as soon as it is issued: early where the others' runs late. */
void npu_emulation_run_ahead(aclrtStream handle) { stream_of(handle)->runs_ahead = true; }

/* Every stream that joined the capture goes back to its own queue. */
void leave_capture(struct graph *graph) {
    lock_queues();
    for (struct stream *stream = all_streams; stream; stream = stream->next)
        if (stream->capture == graph) stream->capture = NULL;
    unlock_queues();
}

/* The stream's record stays: events may name it. */
aclError aclrtDestroyStream(aclrtStream handle) {
    struct stream *stream = stream_of(handle);
    wait_until(stream, stream->issued);
    return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout) {
    struct stream *stream = stream_of(handle);
    if (stream->capture) return ACL_ERROR_RT_STREAM_CAPTURED;
    count(COUNT_stream_syncs);
    wait_until(stream, stream->issued);
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream handle) { return aclrtSynchronizeStreamWithTimeout(handle, -1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    if (is_capturing()) return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    count(COUNT_device_syncs);
    wait_for_device();
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    struct stream *stream = stream_of(handle);
    if (stream->executed < stream->issued && ++stream->num_queries < PATIENCE) {
        *status = ACL_STREAM_STATUS_NOT_READY;
        return ACL_SUCCESS;
    }
    wait_until(stream, stream->issued);
    stream->num_queries = 0;
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
