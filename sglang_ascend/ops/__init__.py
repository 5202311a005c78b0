"""The ground: every operator once, as a signature, a PyTorch reference that is its
definition, and the implementations that may stand in for it. No policy, no SGLang."""
