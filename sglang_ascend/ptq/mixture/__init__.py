"""Calibration text mixed of named sets by ratio: `--calibrate code:0.4,maths:0.3,zh.jsonl:0.3`."""
