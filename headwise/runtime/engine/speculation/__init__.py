"""Guesses of a sequence's next tokens, which one step checks all at once."""
