/* Kernels: torch_npu's launches compute nothing here; the Python side queues a closure that does. */
#include "emulation.h"

typedef void (*run_closure)(int64_t call, int action);
static run_closure runner;
static __thread bool skips_copies;

/* `run` is called with the number of a closure and a call_action; it takes the interpreter's lock itself. */
void npu_emulation_set_runner(run_closure run) { runner = run; }

void run_call(int64_t call, enum call_action action) { runner(call, action); }

void npu_emulation_call(aclrtStream handle, int64_t call) {
    struct stream *stream = stream_of(handle);
    if (stream->updating) {
        replace_call(stream->updating, call);
        return;
    }
    struct work work = new_work(CALL);
    work.call = call;
    issue(stream, work);
}

/* Executes what is queued on the stream without counting a synchronisation. */
void npu_emulation_finish(aclrtStream handle) {
    struct stream *stream = stream_of(handle);
    wait_until(stream, stream->issued);
}

bool npu_emulation_is_capturing(aclrtStream handle) { return stream_of(handle)->capture != NULL; }

/* While torch_npu dispatches an operator whose result a closure computes, its copies between device buffers
   move what its kernels did not compute: counted, and not made. Of the calling thread only. */
void npu_emulation_skip_copies(bool skip) { skips_copies = skip; }
bool copies_on_device_are_skipped(void) { return skips_copies; }
