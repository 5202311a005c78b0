#!/bin/sh
# The user that installs and serves: number 1000, as the images' USER says.
set -eu
useradd --create-home --uid 1000 --user-group sglang
# WORKDIR would make it as root.
install --directory --owner=sglang --group=sglang /home/sglang/sglang-ascend
