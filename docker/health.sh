#!/usr/bin/env bash
# Exits 0 when the server of this container answers.
python=$(dirname "$0")/../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -c \
    'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=8)' \
    "http://127.0.0.1:${PORT:-30000}/health"
