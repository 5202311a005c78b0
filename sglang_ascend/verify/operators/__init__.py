"""The operators of a device: right, never waiting, and how fast."""
