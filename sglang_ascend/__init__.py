"""MTP speculative decoding for SGLang on Ascend NPUs and CPUs; imports neither torch nor sglang."""

__version__ = "0.1.0"
