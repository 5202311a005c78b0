/* What torch_npu makes to describe an operator's arguments: only shapes are ever read back. */
#include "emulation.h"
#include "acl/acl_op_compiler.h"

#define MAX_DIMS 16
#define NUM_KEPT 8192 /* torch_npu reads the shape of a result after it destroyed the descriptor */

struct tensor {
    int64_t shape[MAX_DIMS];
    uint64_t num_dims;
};

static struct tensor anything[1]; /* what every other descriptor points to */

void *aclCreateTensor(const int64_t *shape, uint64_t num_dims, aclDataType type, const int64_t *strides,
                      int64_t offset, aclFormat format, const int64_t *storage_shape,
                      uint64_t num_storage_dims, void *data) {
    struct tensor *tensor = calloc(1, sizeof *tensor);
    tensor->num_dims = num_dims < MAX_DIMS ? num_dims : MAX_DIMS;
    if (shape) memcpy(tensor->shape, shape, tensor->num_dims * sizeof *shape);
    return tensor;
}

int aclDestroyTensor(const void *tensor) {
    static void *kept[NUM_KEPT];
    static unsigned num_destroyed;
    if (!tensor || tensor == anything) return 0;
    unsigned slot = __atomic_fetch_add(&num_destroyed, 1, __ATOMIC_RELAXED) % NUM_KEPT;
    free(__atomic_exchange_n(&kept[slot], (void *)tensor, __ATOMIC_ACQ_REL));
    return 0;
}

/* The caller frees the shape, with delete[]. */
int aclGetViewShape(const struct tensor *tensor, int64_t **shape, uint64_t *num_dims) {
    *num_dims = tensor->num_dims;
    *shape = malloc(MAX_DIMS * sizeof **shape);
    memcpy(*shape, tensor->shape, MAX_DIMS * sizeof **shape);
    return 0;
}

void *aclCreateScalar(void) { return anything; }
void *aclCreateScalarList(void) { return anything; }
void *aclCreateIntArray(void) { return anything; }
void *aclCreateFloatArray(void) { return anything; }
void *aclCreateBoolArray(void) { return anything; }
void *aclCreateTensorList(void) { return anything; }

aclTensorDesc *aclCreateTensorDesc(aclDataType type, int num_dims, const int64_t *shape, aclFormat format) {
    return (aclTensorDesc *)anything;
}
aclDataBuffer *aclCreateDataBuffer(void *data, size_t num_bytes) { return (aclDataBuffer *)anything; }
aclopAttr *aclopCreateAttr(void) { return (aclopAttr *)anything; }

aclError aclopCompileAndExecute(const char *name, int num_inputs, const aclTensorDesc *const input_descs[],
                                const aclDataBuffer *const inputs[], int num_outputs,
                                const aclTensorDesc *const output_descs[], aclDataBuffer *const outputs[],
                                const aclopAttr *attributes, aclopEngineType engine,
                                aclopCompileType compile, const char *path, aclrtStream stream) {
    count_launch(strdup(name));
    return ACL_SUCCESS;
}
aclError aclopCompileAndExecuteV2(const char *name, int num_inputs, aclTensorDesc *input_descs[],
                                  aclDataBuffer *inputs[], int num_outputs, aclTensorDesc *output_descs[],
                                  aclDataBuffer *outputs[], aclopAttr *attributes, aclopEngineType engine,
                                  aclopCompileType compile, const char *path, aclrtStream stream) {
    count_launch(strdup(name));
    return ACL_SUCCESS;
}

/* Compiling operators at run time is off: torch_npu's answer to "disable" are the aclnn operators. */
size_t aclGetCompileoptSize(aclCompileOpt option) { return sizeof "disable"; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    snprintf(value, length, "disable");
    return ACL_SUCCESS;
}
