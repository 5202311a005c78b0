"""The CPU as an SGLang platform."""
