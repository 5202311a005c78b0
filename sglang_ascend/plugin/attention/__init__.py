"""SGLang's attention backend slots over its KV pools."""
