"""What the steps of a server cost, as it learns it."""
