/* What the files of the emulated Ascend runtime share: counters, streams and the work queued on them. */
#ifndef NPU_EMULATION_H
#define NPU_EMULATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"

/* Bytes of memory that no finished work has written: finite in every float format, and no likely value. */
#define POISON 0xEE
/* A query of unfinished work says so this often before the device gets on with it, so that polling ends. */
#define PATIENCE 64

/* ---- counters.c: calls that torch_npu made, by kind ---- */
#define COUNTERS(X) \
    X(launches) X(graph_replays) \
    X(h2d) X(d2h) X(d2d) X(async_h2d) X(async_d2h) X(async_d2d) X(memsets) \
    X(stream_syncs) X(event_syncs) X(device_syncs) X(mallocs)
enum counter {
#define AS_ENUM(name) COUNT_##name,
    COUNTERS(AS_ENUM)
#undef AS_ENUM
    NUM_COUNTERS
};
void count(enum counter which);
void count_launch(const char *name);

/* ---- streams.c: work in order ---- */
struct graph;
struct task_group;

struct communicator;

enum work_kind { COPY, FILL, CALL, WAIT, WRITE_VALUE, WAIT_VALUE, REPLAY, UPDATE, COLLECTIVE };
enum collective_kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

struct collective {  /* collectives.py has the same */
    struct communicator *communicator;
    enum collective_kind kind;
    const void *source;
    void *target;
    uint64_t count;        /* elements: HCCL's argument */
    int type, reduction;   /* HcclDataType, HcclReduceOp */
    uint32_t root;
};

struct work {
    enum work_kind kind;
    void *target;              /* COPY, FILL; *_VALUE: the word */
    const void *source;        /* COPY */
    size_t num_bytes;          /* COPY, FILL */
    int value;                 /* COPY: the aclrtMemcpyKind; FILL: the byte; WAIT_VALUE: the condition */
    int64_t call;              /* CALL: the number of a closure on the Python side */
    struct stream *stream;     /* WAIT: until this stream has executed `position` pieces of work */
    uint64_t position;         /* *_VALUE: the value */
    struct graph *graph;       /* REPLAY */
    struct task_group *group;  /* UPDATE */
    struct collective collective;
    bool late;                 /* COPY: lands at the end of the host's wait, behind what was issued later */
    struct work *next;
};

/* Pieces of work of which a stream remembers when they were done. */
#define REMEMBERED 4096

struct stream {
    struct work *head, *tail;
    uint64_t issued, executed;    /* pieces of work; the difference is queued */
    double done[REMEMBERED];      /* seconds of a clock, when piece i - 1 was, at i % REMEMBERED */
    struct graph *capture;        /* the graph that takes this stream's work, or NULL */
    struct task_group *updating;  /* the captured group whose calls are being replaced, or NULL */
    bool runs_ahead;              /* work runs as soon as it is issued: streams that update graphs */
    int num_queries;
    struct stream *next;
};

struct stream *stream_of(aclrtStream handle);  /* NULL is the default stream */
struct work new_work(enum work_kind kind);
void issue(struct stream *stream, struct work work);
bool anything_pending(void);
/* Lets the device work until `stream` has executed `position` pieces; the caller waits for it. */
void wait_until(struct stream *stream, uint64_t position);
void wait_for_device(void);
void execute(struct work *work);  /* with the device's lock held */
void run_stream(struct stream *stream, uint64_t position);  /* likewise */
bool run_to_write_of(const void *word);                     /* likewise; whether some stream writes it */
void leave_capture(struct graph *graph);
void lock_queues(void);
void unlock_queues(void);
void fail(const char *sentence);  /* says why and ends the process */

/* ---- calls.c: closures of the Python side ---- */
enum call_action { CALL_ONCE, CALL_AND_KEEP, CALL_FORGET };
void run_call(int64_t call, enum call_action action);
bool copies_on_device_are_skipped(void);

/* ---- collectives.c ---- */
#define ROOT_INFO_BYTES 4108 /* of HcclRootInfo, which hccl.h declares for C++ only */
#define COMMUNICATOR_NAME_BYTES 128
void run_collective(const struct collective *collective);
uint64_t npu_emulation_num_run(const struct communicator *communicator);

/* ---- memory.c ---- */
void copy_now(const struct work *work);
void poison_target(const struct work *work);

/* ---- values.c ---- */
void write_value(const struct work *work);
void wait_value(const struct work *work);

/* ---- graphs.c ---- */
void capture(struct stream *stream, struct work work);
void replay(struct graph *graph);
void apply_update(struct task_group *group);
void replace_call(struct task_group *group, int64_t call);
bool is_capturing(void);
bool has_collective(const struct graph *graph, const struct communicator *communicator);

#endif
