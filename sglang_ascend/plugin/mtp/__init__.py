"""SGLang's speculative worker slots, and what one step runs on."""
