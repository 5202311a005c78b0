"""A separate small model that drafts, SGLang's STANDALONE, by this package's step."""
