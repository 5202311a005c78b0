/* Device and pinned memory are host memory; copies and fills, at once or as work of a stream. */
#include "emulation.h"

static aclError allocate(void **pointer, size_t num_bytes) {
    if (posix_memalign(pointer, 512, num_bytes + 64) != 0) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    memset(*pointer, POISON, num_bytes);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **pointer, size_t num_bytes, aclrtMemMallocPolicy policy) {
    count(COUNT_mallocs);
    return allocate(pointer, num_bytes);
}
aclError aclrtMallocAlign32(void **pointer, size_t num_bytes, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, num_bytes, policy);
}
aclError aclrtMallocWithCfg(void **pointer, size_t num_bytes, aclrtMemMallocPolicy policy,
                            aclrtMallocConfig *config) {
    return aclrtMalloc(pointer, num_bytes, policy);
}
aclError aclrtMallocHost(void **pointer, size_t num_bytes) { return allocate(pointer, num_bytes); }
aclError aclrtMallocHostWithCfg(void **pointer, uint64_t num_bytes, aclrtMallocConfig *config) {
    return allocate(pointer, num_bytes);
}

/* Work that is still queued may name the memory. */
aclError aclrtFree(void *pointer) {
    wait_for_device();
    free(pointer);
    return ACL_SUCCESS;
}
aclError aclrtFreeHost(void *pointer) { return aclrtFree(pointer); }

aclError aclrtGetMemInfo(aclrtMemAttr which, size_t *num_free, size_t *num_total) {
    *num_free = *num_total = 8ull << 30;
    return ACL_SUCCESS;
}

void copy_now(const struct work *work) { memmove(work->target, work->source, work->num_bytes); }

/* A buffer is poison while a copy into it is under way. Work of the device that is still queued may be
   meant to read the old content, so a device's buffer is left alone until nothing is queued. */
void poison_target(const struct work *work) {
    bool host_reads_it = work->kind == COPY && work->value == ACL_MEMCPY_DEVICE_TO_HOST;
    if (host_reads_it || !anything_pending()) memset(work->target, POISON, work->num_bytes);
}

static bool copies_are_late;
void npu_emulation_late_copies(bool late) { copies_are_late = late; }

static bool is_known(aclrtMemcpyKind kind) { return kind <= ACL_MEMCPY_DEVICE_TO_DEVICE; }

/* Waits for nothing: what is queued and unfinished, it does not see. */
aclError aclrtMemcpy(void *target, size_t max_bytes, const void *source, size_t num_bytes,
                     aclrtMemcpyKind kind) {
    if (!is_known(kind) || num_bytes > max_bytes) return ACL_ERROR_INVALID_PARAM;
    if (is_capturing()) return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE) count(COUNT_h2d);
    if (kind == ACL_MEMCPY_DEVICE_TO_HOST) count(COUNT_d2h);
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE) count(COUNT_d2d);
    memmove(target, source, num_bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *target, size_t max_bytes, const void *source, size_t num_bytes,
                          aclrtMemcpyKind kind, aclrtStream handle) {
    if (!is_known(kind) || num_bytes > max_bytes) return ACL_ERROR_INVALID_PARAM;
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE) count(COUNT_async_h2d);
    if (kind == ACL_MEMCPY_DEVICE_TO_HOST) count(COUNT_async_d2h);
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE) {
        count(COUNT_async_d2d);
        if (copies_on_device_are_skipped()) return ACL_SUCCESS;
    }
    struct work work = new_work(COPY);
    work.target = target, work.source = source, work.num_bytes = num_bytes, work.value = kind;
    work.late = copies_are_late && kind == ACL_MEMCPY_HOST_TO_DEVICE;
    issue(stream_of(handle), work);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void *target, size_t max_bytes, int32_t value, size_t num_bytes) {
    if (num_bytes > max_bytes) return ACL_ERROR_INVALID_PARAM;
    count(COUNT_memsets);
    memset(target, value, num_bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *target, size_t max_bytes, int32_t value, size_t num_bytes,
                          aclrtStream handle) {
    if (num_bytes > max_bytes) return ACL_ERROR_INVALID_PARAM;
    count(COUNT_memsets);
    struct work work = new_work(FILL);
    work.target = target, work.num_bytes = num_bytes, work.value = value;
    issue(stream_of(handle), work);
    return ACL_SUCCESS;
}
