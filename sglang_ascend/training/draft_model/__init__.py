"""`sglang-ascend train-draft`: a small model is distilled from the target that it drafts for."""
