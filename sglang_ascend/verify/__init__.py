"""`sglang-ascend verify-npu`: what can only be shown on a card, shown by whoever has one."""
