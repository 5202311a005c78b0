/* Captured graphs: the work of the capturing streams in the order it was issued, replayed as one launch.
   Task groups are its parts that an update replaces: the calls issued between TaskUpdateBegin and End. */
#include "emulation.h"

struct task_group {
    struct graph *graph;
    size_t first, end;       /* the group's work within the graph */
    int64_t *replacements;   /* calls of an update that is being issued */
    size_t num_replacements;
};

struct graph {
    struct work *work;
    size_t num_work, capacity;
    struct task_group *open_group;
    size_t num_replays_queued;
    bool is_destroyed;
};

static int num_captures;

bool is_capturing(void) { return __atomic_load_n(&num_captures, __ATOMIC_ACQUIRE) != 0; }

void capture(struct stream *stream, struct work work) {
    struct graph *graph = stream->capture;
    lock_queues();
    if (graph->num_work == graph->capacity) {
        graph->capacity = graph->capacity ? 2 * graph->capacity : 64;
        graph->work = realloc(graph->work, graph->capacity * sizeof work);
    }
    graph->work[graph->num_work++] = work;
    unlock_queues();
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    struct stream *stream = stream_of(handle);
    if (stream->capture) return ACL_ERROR_RT_STREAM_CAPTURED;
    stream->capture = calloc(1, sizeof *stream->capture);
    __atomic_add_fetch(&num_captures, 1, __ATOMIC_ACQ_REL);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    struct stream *stream = stream_of(handle);
    *status = stream->capture ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = stream->capture;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model) {
    struct stream *stream = stream_of(handle);
    if (!stream->capture) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    *model = stream->capture;
    leave_capture(stream->capture);
    __atomic_sub_fetch(&num_captures, 1, __ATOMIC_ACQ_REL);
    return ACL_SUCCESS;
}

static void destroy_if_unused(struct graph *graph) {
    if (!graph->is_destroyed || graph->num_replays_queued) return;
    for (size_t i = 0; i < graph->num_work; i++)
        if (graph->work[i].kind == CALL) run_call(graph->work[i].call, CALL_FORGET);
    free(graph->work);
    free(graph);
}

aclError aclmdlRIDestroy(aclmdlRI model) {
    struct graph *graph = model;
    graph->is_destroyed = true;
    destroy_if_unused(graph);
    return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
    struct graph *graph = model;
    count_launch("graph");
    count(COUNT_graph_replays);
    for (size_t i = 0; i < graph->num_work; i++)
        if (graph->work[i].kind == COPY) poison_target(&graph->work[i]);
    struct work work = new_work(REPLAY);
    work.graph = graph;
    graph->num_replays_queued++;
    issue(stream_of(handle), work);
    return ACL_SUCCESS;
}

void replay(struct graph *graph) {
    for (size_t i = 0; i < graph->num_work; i++) {
        if (graph->work[i].kind == CALL) run_call(graph->work[i].call, CALL_AND_KEEP);
        else execute(&graph->work[i]);
    }
    graph->num_replays_queued--;
    destroy_if_unused(graph);
}

bool has_collective(const struct graph *graph, const struct communicator *communicator) {
    for (size_t i = 0; i < graph->num_work; i++) {
        const struct work *work = &graph->work[i];
        if (work->kind == COLLECTIVE && work->collective.communicator == communicator) return true;
    }
    return false;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    struct graph *graph = stream_of(handle)->capture;
    if (!graph) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    graph->open_group = calloc(1, sizeof *graph->open_group);
    graph->open_group->graph = graph;
    graph->open_group->first = graph->num_work;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
    struct graph *graph = stream_of(handle)->capture;
    if (!graph || !graph->open_group) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    graph->open_group->end = graph->num_work;
    *group = graph->open_group;
    graph->open_group = NULL;
    return ACL_SUCCESS;
}

/* An update's stream runs ahead: its replacements are in place long before a replay that was issued earlier
   and is not waited for, which then computes with them, as a device may. */
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
    struct stream *stream = stream_of(handle);
    stream->runs_ahead = true;
    stream->updating = group;
    return ACL_SUCCESS;
}

void replace_call(struct task_group *group, int64_t call) {
    size_t num_bytes = (group->num_replacements + 1) * sizeof call;
    group->replacements = realloc(group->replacements, num_bytes);
    group->replacements[group->num_replacements++] = call;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    struct stream *stream = stream_of(handle);
    struct work work = new_work(UPDATE);
    work.group = stream->updating;
    stream->updating = NULL;
    issue(stream, work);
    return ACL_SUCCESS;
}

void apply_update(struct task_group *group) {
    size_t taken = 0;
    for (size_t i = group->first; i < group->end; i++) {
        struct work *work = &group->graph->work[i];
        if (work->kind != CALL) continue;
        if (taken == group->num_replacements) fail("an update has fewer calls than the group it updates.");
        run_call(work->call, CALL_FORGET);
        work->call = group->replacements[taken++];
    }
    if (taken != group->num_replacements) fail("an update has more calls than the group it updates.");
    group->num_replacements = 0;
}
