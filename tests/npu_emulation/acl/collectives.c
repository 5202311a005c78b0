/* HCCL: communicators, and collectives as work of a stream. What ranks exchange, the Python side does. */
#include "emulation.h"

struct communicator {
    uint32_t rank, num_ranks;
    uint64_t num_run;  /* collectives that this rank has finished */
    char name[COMMUNICATOR_NAME_BYTES];
};

static struct exchange {
    void (*describe_root)(char *root);
    void (*join)(struct communicator *communicator, const char *root, uint32_t rank, uint32_t num_ranks);
    void (*run)(const struct collective *collective, uint64_t number);
} exchange;

/* They take the interpreter's lock themselves. Where none are set collectives are counted and do nothing. */
void npu_emulation_set_exchange(struct exchange functions) { exchange = functions; }

uint64_t npu_emulation_num_run(const struct communicator *communicator) {
    return __atomic_load_n(&communicator->num_run, __ATOMIC_ACQUIRE);
}

void run_collective(const struct collective *collective) {
    struct communicator *communicator = collective->communicator;
    if (exchange.run) exchange.run(collective, communicator->num_run);
    __atomic_add_fetch(&communicator->num_run, 1, __ATOMIC_ACQ_REL);
}

int HcclGetRootInfo(char *root) {
    memset(root, 0, ROOT_INFO_BYTES);
    if (exchange.describe_root) exchange.describe_root(root);
    return 0;
}

int HcclCommInitRootInfo(uint32_t num_ranks, const char *root, uint32_t rank, struct communicator **handle) {
    struct communicator *communicator = calloc(1, sizeof *communicator);
    communicator->rank = rank, communicator->num_ranks = num_ranks;
    memcpy(communicator->name, root, sizeof communicator->name - 1);
    if (exchange.join) exchange.join(communicator, root, rank, num_ranks);
    *handle = communicator;
    return 0;
}
int HcclCommInitRootInfoConfig(uint32_t num_ranks, const char *root, uint32_t rank, const void *config,
                               struct communicator **handle) {
    return HcclCommInitRootInfo(num_ranks, root, rank, handle);
}

/* The communicator's record stays: work that is queued or captured may name it. */
int HcclCommDestroy(struct communicator *communicator) { return 0; }

int HcclGetCommName(const struct communicator *communicator, char *name) {
    memcpy(name, communicator->name, sizeof communicator->name);
    return 0;
}
int HcclGetCommAsyncError(const struct communicator *communicator, int *error) {
    *error = 0;
    return 0;
}

static int launch(const char *name, aclrtStream stream, struct collective collective) {
    count_launch(name);
    struct work work = new_work(COLLECTIVE);
    work.collective = collective;
    issue(stream_of(stream), work);
    return 0;
}

int HcclAllReduce(const void *source, void *target, uint64_t count, int type, int reduction,
                  struct communicator *communicator, aclrtStream stream) {
    struct collective collective = {communicator, ALL_REDUCE, source, target, count, type, reduction};
    return launch("HcclAllReduce", stream, collective);
}
int HcclReduceScatter(const void *source, void *target, uint64_t count, int type, int reduction,
                      struct communicator *communicator, aclrtStream stream) {
    struct collective collective = {communicator, REDUCE_SCATTER, source, target, count, type, reduction};
    return launch("HcclReduceScatter", stream, collective);
}
int HcclAllGather(const void *source, void *target, uint64_t count, int type,
                  struct communicator *communicator, aclrtStream stream) {
    struct collective collective = {communicator, ALL_GATHER, source, target, count, type};
    return launch("HcclAllGather", stream, collective);
}
int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, struct communicator *communicator,
                  aclrtStream stream) {
    struct collective collective = {communicator, BROADCAST, buffer, buffer, count, type, 0, root};
    return launch("HcclBroadcast", stream, collective);
}

/* torch_npu makes a communicator for each pair of ranks that send to each other: a broadcast within it. */
static int transfer(const char *name, void *buffer, uint64_t count, int type, uint32_t sender,
                    struct communicator *communicator, aclrtStream stream) {
    if (communicator->num_ranks != 2) fail("ranks send to each other in a communicator of two only.");
    struct collective collective = {communicator, BROADCAST, buffer, buffer, count, type, 0, sender};
    return launch(name, stream, collective);
}
int HcclSend(void *buffer, uint64_t count, int type, uint32_t receiver, struct communicator *communicator,
             aclrtStream stream) {
    return transfer("HcclSend", buffer, count, type, communicator->rank, communicator, stream);
}
int HcclRecv(void *buffer, uint64_t count, int type, uint32_t sender, struct communicator *communicator,
             aclrtStream stream) {
    return transfer("HcclRecv", buffer, count, type, sender, communicator, stream);
}
