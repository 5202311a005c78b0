"""`sglang-ascend train-mtp`: every stage from a target to the folder that is served."""
