#!/bin/sh
# What a base image lacks of git, make and a C compiler.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends build-essential ca-certificates git libnuma1 make
rm -rf /var/lib/apt/lists/*
