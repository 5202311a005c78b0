"""`sglang-ascend doctor`."""
