"""How a step draws, and which drafts it keeps, by what its requests ask for."""
