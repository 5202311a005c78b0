"""How many tokens a step should draft, by what steps cost and how many drafts are kept."""
