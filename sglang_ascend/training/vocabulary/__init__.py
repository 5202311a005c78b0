"""`sglang-ascend build-vocabulary`: text in, the tokens of each language's drafts out."""
