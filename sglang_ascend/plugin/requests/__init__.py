"""What a request may ask for: checks, penalties, seeds, text."""
