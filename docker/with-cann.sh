#!/usr/bin/env bash
# Runs a command in CANN's environment, as the entry point of CANN's own images does.
set -eo pipefail
ascend=${ASCEND_ROOT:-/usr/local/Ascend}

# CANN's scripts read variables that may be unset. The second one finds bishengir for triton-ascend.
for script in "$ascend/ascend-toolkit/set_env.sh" "$ascend"/cann-*/share/info/ascendnpu-ir/bin/set_env.sh \
    "$ascend/nnal/atb/set_env.sh"; do
    # shellcheck disable=SC1090  # it stands in the base image
    if [ -f "$script" ]; then . "$script"; fi
done
# Where compose.yaml mounts the folders of this machine that may have npu-smi.
export PATH="$PATH:/host/bin:/host/sbin"
exec "$@"
