"""What a model takes of its devices' memory, before any weight is there."""
