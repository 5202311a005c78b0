"""How a request's sampling parameters become tokens; SGLang-free."""
