/* The machine: how many devices, of which SoC, under which CANN version; from the environment. */
#include "emulation.h"

static __thread int current_device;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

aclError aclrtGetDeviceCount(uint32_t *num_devices) {
    *num_devices = (uint32_t)atoi(setting("NPU_EMULATION_DEVICES", "1"));
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t device) {
    current_device = device;
    return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext *context) {
    static int the_context;
    *context = &the_context;
    return ACL_SUCCESS;
}

const char *aclrtGetSocName(void) { return setting("NPU_EMULATION_SOC", "Ascend910B3"); }
const char *aclGetRecentErrMsg(void) { return ""; }

static const char *cann_version(void) { return setting("NPU_EMULATION_CANN", "8.5.0"); }

aclError aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, cann_version());
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    snprintf(version->version, sizeof version->version, "%s", cann_version());
    sscanf(cann_version(), "%63[^.].%63[^.].%63[^.]", version->majorVersion, version->minorVersion,
           version->releaseVersion);
    return ACL_SUCCESS;
}
