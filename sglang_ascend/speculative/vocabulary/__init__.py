"""The draft vocabulary: the tokens that a draft may be, by list, language and context."""
